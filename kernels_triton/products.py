"""The matrix products of models/, and weights in the form that the CPU reads fastest."""

from __future__ import annotations

from functools import cache, cached_property

import torch
import torch.nn.functional as F

from . import cublas

Tensor = torch.Tensor

# oneDNN chooses a blocking by the expected number of rows: that for 32 serves 1 and 512 within a few percent
ROWS = 32


class Packed:
    """A weight blocked by oneDNN, once, for one product. Against plain torch on the CPU: half the time or less.

    `shape` is the weight's own; `matrix` is what `pack` makes of it; `tail` is what the product appends to x's free
    axes.
    """

    def __init__(self, weight: Tensor, product: str):
        plain, self.tail = plain_matrix(weight, product)
        self.shape, self.product, self.depth = weight.shape, product, len(plain)
        self.shared, self.first = contraction(product)
        self.matrix = self.pack(plain)

    def pack(self, plain: Tensor) -> Tensor:
        """The matrix [depth, N] as it is kept."""
        # looked up here and not at import: not every build of torch has oneDNN
        self.linear = torch.ops.mkldnn._linear_pointwise.default
        return torch.ops.mkldnn._reorder_linear_weight(plain.t(), ROWS)

    def unpack(self) -> Tensor:
        """The matrix [depth, N] as it was."""
        return self.matrix.to_dense().t()

    def check(self, spec: str) -> None:
        """Refuses another product than its own."""
        if self.product != spec:
            raise ValueError(f"this weight was prepared for {self.product!r}, not for {spec!r}")

    def times(self, x: Tensor) -> Tensor:
        """x's last axes contracted with the weight."""
        free = x.shape[: x.ndim - self.shared]
        y = self.linear(x.reshape(-1, self.depth), self.matrix, None, "none", [], "")
        return y if len(self.tail) == 1 and len(free) == 1 else y.view(*free, *self.tail)

    def dense(self) -> Tensor:
        """The weight as it was."""
        plain = self.unpack()
        return (plain if self.first else plain.t()).reshape(self.shape)

    def look_up(self, ids: Tensor) -> Tensor:
        """weight[ids]."""
        return self.rows.index_select(0, ids)

    @cached_property
    def rows(self) -> Tensor:
        """The same, kept: a tied table is looked up in as well, which the blocked form cannot do."""
        return self.dense()

    def release(self) -> None:
        """Frees the weight: it is not to be used any more."""
        del self.matrix
        self.__dict__.pop("rows", None)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return (2 if "rows" in self.__dict__ else 1) * self.shape.numel() * self.matrix.element_size()


class Twofold(Tensor):
    """A weight that lies in memory twice: as it is, and `turned`, [N, depth]. To all but few rows it is the first."""

    depth: int
    turned: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def of(weight: Tensor, depth: int) -> Twofold:
        """The weight, whose first axes are those of the depth, turned as well."""
        both = Twofold.once(weight, depth)
        both.turned = weight.reshape(depth, -1).t().contiguous()
        return both

    @staticmethod
    def once(weight: Tensor, depth: int) -> Twofold:
        """One that only remembers that it is to be turned: on its way to sleep."""
        # no view: one would keep the weight's memory when it is released itself
        both = torch.Tensor._make_subclass(Twofold, weight)
        both.depth = depth
        return both

    def release(self) -> None:
        """Frees the weight: it is not to be used any more."""
        del self.turned
        self.set_()  # pyright: ignore[reportCallIssue]


def pack(weight: Tensor, product: str | None) -> Tensor | Packed:
    """The weight for `product`: blocked where oneDNN multiplies its dtype natively, else itself."""
    if product is None or weight.device.type != "cpu" or not packs(weight.dtype):
        return weight
    return Packed(weight, product)


def plain_matrix(weight: Tensor, product: str) -> tuple[Tensor, torch.Size]:
    """A view of the weight as [depth, N], and the axes that N stands for."""
    shared, first = contraction(product)
    if first:
        return weight.reshape(weight.shape[:shared].numel(), -1), weight.shape[shared:]
    free = weight.ndim - shared
    return weight.reshape(-1, weight.shape[free:].numel()).t(), weight.shape[:free]


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether this CPU has oneDNN products in that dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def matmul(spec: str, x: Tensor, w: Tensor | Packed) -> Tensor:
    """A matrix product on 2-D views: the letters that end x are contracted with those that begin or end w."""
    if isinstance(w, Packed):
        w.check(spec)
        return w.times(x)
    shared, first = contraction(spec)
    if x.is_cuda and (y := cublas.product(x, w, shared, first, None)) is not None:
        return y
    free = x.shape[: x.ndim - shared]
    if first:
        tail, depth = w.shape[shared:], w.shape[:shared].numel()
        return (x.reshape(-1, depth) @ w.reshape(depth, -1)).reshape(*free, *tail)
    tail, depth = w.shape[: w.ndim - shared], w.shape[w.ndim - shared :].numel()
    return F.linear(x.reshape(-1, depth), w.reshape(-1, depth)).reshape(*free, *tail)


def look_up(table: Tensor | Packed, ids: Tensor) -> Tensor:
    """table[ids]."""
    return table.index_select(0, ids) if isinstance(table, Tensor) else table.look_up(ids)


def adds(x: Tensor, w: Tensor | Packed) -> bool:
    """Whether matmul_add is for them: on a GPU, where the sum would be one more pass over memory."""
    return isinstance(w, Tensor) and x.is_cuda


def matmul_add(spec: str, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """y plus the product, in y's own memory; rounded once."""
    shared, first = contraction(spec)
    if cublas.product(x, w, shared, first, y) is not None:
        return y
    tail, depth = (w.shape[shared:], w.shape[:shared]) if first else (w.shape[:-shared], w.shape[-shared:])
    plain = w.reshape(depth.numel(), -1) if first else w.reshape(-1, depth.numel()).t()
    y.view(-1, tail.numel()).addmm_(x.reshape(-1, depth.numel()), plain)
    return y


@cache
def contraction(spec: str) -> tuple[int, bool]:
    """How many letters are contracted, and whether they begin w (else they end it)."""
    xs, ws, ys = spec.replace("->", ",").split(",")
    shared = "".join(a for a in xs if a in ws)
    if shared and xs.endswith(shared):
        free = xs.removesuffix(shared)
        if ws.startswith(shared) and ys == free + ws.removeprefix(shared):
            return len(shared), True
        if ws.endswith(shared) and ys == free + ws.removesuffix(shared):
            return len(shared), False
    raise NotImplementedError(f"einsum {spec!r}: the contracted letters must end x, and begin or end w")
