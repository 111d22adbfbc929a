"""Weights as the compiled products read them: tiles of columns, one behind the other, each read from end to end."""

from __future__ import annotations

import torch

from .native import Native
from .products import Packed, plain_matrix

Tensor = torch.Tensor

TILE = 32  # columns; as in cpu_kernels.c


def pairs(dtype: torch.dtype) -> int:
    """How many rows of a column lie together."""
    return 2 if dtype == torch.bfloat16 else 1


class Blocked(Packed):
    """A weight in tiles, [tiles, depth, column] (of bfloat16 [tiles, depth / 2, column, 2]), for one product."""

    def __init__(self, weight: Tensor, product: str, native: Native):
        self.native = native
        super().__init__(weight, product)
        # whether gates and ups lie in whole tiles
        self.gates = len(self.tail) == 2 and self.tail[0] == 2 and self.tail[1] % TILE == 0

    @staticmethod
    def serves(weight: Tensor, product: str, native: Native) -> bool:
        """Whether the kernels multiply by such a weight: of their dtype, and its pairs of rows come whole."""
        if not native.has_products or weight.dtype is not native.dtype:
            return False
        return len(plain_matrix(weight, product)[0]) % pairs(weight.dtype) == 0

    def pack(self, plain: Tensor) -> Tensor:
        depth, columns = plain.shape
        pair, tiles = pairs(plain.dtype), -(-columns // TILE)
        matrix = plain.new_empty((tiles, depth // pair, TILE, pair))
        self.native.pack(plain, matrix)
        return matrix

    def unpack(self) -> Tensor:
        plain = self.matrix.permute(1, 3, 0, 2).reshape(self.depth, -1)
        return plain[:, : self.tail.numel()]

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows of a table, without a copy of it."""
        if self.first or self.shared != 1 or len(self.tail) != 1:
            return super().look_up(ids)
        return self.native.look_up(self.matrix, ids, self.depth, self.tail.numel())

    def times(
        self, x: Tensor, norm: tuple[Tensor, float] | None = None, gate: bool = False, add: Tensor | None = None
    ) -> Tensor:
        """x's last axes contracted with the weight; norm, gate and add as in TorchOps.einsum."""
        free, tail = x.shape[: x.ndim - self.shared], self.tail[1:] if gate else self.tail
        add = add if add is None else add.contiguous()
        y = self.native.product(x.reshape(-1, self.depth), self.matrix, tail.numel(), norm, gate, add)
        return y if len(tail) == 1 and len(free) == 1 else y.view(*free, *tail)
