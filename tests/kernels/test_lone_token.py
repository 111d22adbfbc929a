"""A step of one token in Triton, in the interpreter: against float64, outputs poisoned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels_triton import lone_token
from octavo.kernels_triton.ops import TorchOps
from octavo.models.interface import AttentionSpec, Rope, Step
from octavo.models.layouts.paged import attend_new

pytestmark = pytest.mark.usefixtures("guarded")

BLOCK = 4


class Batch:
    """One sequence of `length` tokens, the last of them new, among blocks that hold NaN where nothing is read."""

    def __init__(self, length: int, heads: int, group: int, dim: int, order: str):
        self.rng, self.length, self.order, blocks = np.random.default_rng(length), length, order, -(-length // BLOCK)
        self.spec = AttentionSpec(heads, group, dim, dim, dim**-0.5)
        self.table = self.rng.permutation(blocks + 3)[:blocks] + 1
        self.old = [self.random(length - 1, heads, dim) for _ in range(2)]
        self.pools = {name: self.pool(x) for name, x in zip("kv", self.old, strict=True)}
        self.angle = self.rng.uniform(0, 6, (1, dim // 2))
        cos, sin = (torch.from_numpy(f(self.angle).astype(np.float32)) for f in (np.cos, np.sin))
        self.rope = Rope(torch.zeros(0), cos, sin)
        # one more block than is needed: a block table is padded
        tables = torch.from_numpy(np.append(self.table, 0).astype(np.int32))[None]
        place, none = torch.tensor([length - 1], dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        self.step = Step(
            none, place, torch.zeros(1, dtype=torch.int32), none, tables[0, place // BLOCK], place % BLOCK, place + 1,
            torch.arange(2, dtype=torch.int32), tables, True, {}, {},
        )  # fmt: skip
        # as they come from one product
        x = torch.from_numpy(self.random(1, heads, group + 2, dim).astype(np.float32))
        self.q, self.new = x[:, :, :-2], {"k": x[:, :, -2], "v": x[:, :, -1]}
        scales = [torch.from_numpy(self.rng.uniform(0.5, 1.5, dim).astype(np.float32)) for _ in range(2)]
        self.norm = (scales[0], scales[1], 1e-6)

    def random(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def pool(self, old: np.ndarray) -> torch.Tensor:
        pool = np.full((len(self.table) + 5, BLOCK, *old.shape[1:]), np.nan, np.float32)
        for n, x in enumerate(old):
            pool[self.table[n // BLOCK], n % BLOCK] = x
        ours = pool if self.order == "n p k d" else pool.swapaxes(1, 2)
        return torch.from_numpy(np.ascontiguousarray(ours))

    def want(self, normed: bool) -> tuple[np.ndarray, np.ndarray]:
        """(the new key, what comes out), in float64."""
        cos, sin = np.cos(self.angle), np.sin(self.angle)

        def turned(x: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
            y = x.double().numpy()
            if normed:
                y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * scale.double().numpy()
            a, b = np.split(y, 2, -1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)[0]

        k, v = (x.astype(np.float64) for x in self.old)
        new_k = turned(self.new["k"], self.norm[1])
        k, v = np.concatenate([k, new_k[None]]), np.concatenate([v, self.new["v"].double().numpy()])
        s = np.einsum("kgd,mkd->kgm", turned(self.q, self.norm[0]), k) * self.spec.scale
        p = np.exp(s - s.max(-1, keepdims=True))
        return new_k, np.einsum("kgm,mkd->kgd", p / p.sum(-1, keepdims=True), v)

    def serves(self, **changes: Any) -> bool:
        given = {"order": self.order, "step": self.step, "spec": self.spec, "sinks": None} | changes
        return lone_token.serves(self.q, self.new, self.rope, given.pop("pools", self.pools), **given)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("order", ["n p k d", "n k p d"], ids=["token-major", "head-major"])
@pytest.mark.parametrize("most", [64, 2])
@pytest.mark.parametrize("length", [1, 2, 17, 33, 70])
def test_a_step_of_one_token_equals_float64(
    length: int, most: int, order: str, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the new key is alone in its split, the first of it or the last; every other slot keeps what it held."""
    monkeypatch.setattr(lone_token, "MAX_SPLITS", most)
    b = Batch(length, 2, 3, 64, order)
    assert b.serves()
    before, (new_k, want) = {name: x.clone() for name, x in b.pools.items()}, b.want(normed)
    norm = b.norm if normed else None
    out = lone_token.attend(b.q, b.new, b.rope, b.pools, order, b.step, b.spec, norm)
    np.testing.assert_allclose(out[0].double().numpy(), want, rtol=0, atol=2e-5)
    at, offset = int(b.step.blocks_T), int(b.step.offsets_T)
    for name, new in (("k", new_k), ("v", b.new["v"][0].numpy())):
        got, old = (x[name] if order == "n p k d" else x[name].transpose(1, 2) for x in (b.pools, before))
        np.testing.assert_allclose(got[at, offset].numpy(), new, rtol=0, atol=2e-5)
        old[at, offset] = got[at, offset]
        assert torch.equal(got.nan_to_num(9.0), old.nan_to_num(9.0))


def test_it_rounds_as_the_ops_one_by_one_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rope and what the cache holds, in half precision."""
    b = Batch(21, 1, 4, 128, "n p k d")
    q, new = b.q.half(), {name: x.half() for name, x in b.new.items()}
    norm = (b.norm[0].half(), b.norm[1].half(), 1e-6)
    pools, others = ({name: x.half() for name, x in b.pools.items()} for _ in range(2))
    out = lone_token.attend(q, new, b.rope, pools, b.order, b.step, b.spec, norm)
    want, others = attend_new(q, new, b.rope, others, b.order, b.step, b.spec, norm, None, TorchOps())
    for got, other in ((out, want), (pools["k"].nan_to_num(9.0), others["k"].nan_to_num(9.0))):
        assert float((got.float() - other.float()).abs().max()) < 4e-3
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    pools = {name: x.half() for name, x in b.pools.items()}
    ops = TorchOps(attention="triton")
    again, _ = ops.attend_new(attend_new, q, new, b.rope, pools, b.order, b.step, b.spec, norm, None)
    assert torch.equal(again, out)


def test_what_is_not_a_lone_plain_token_is_for_others() -> None:
    b = Batch(5, 1, 2, 64, "n p k d")
    assert b.serves()
    assert not b.serves(step=replace(b.step, decode=False))
    assert not b.serves(step=replace(b.step, block_tables_SB=b.step.block_tables_SB.repeat(2, 1)))
    assert not b.serves(step=replace(b.step, block_tables_SB=b.step.block_tables_SB.repeat(1, 4000)))
    assert not b.serves(spec=replace(b.spec, window=3))
    assert not b.serves(spec=replace(b.spec, group_size=8))
    assert not b.serves(spec=replace(b.spec, softcap=3.0))
    assert not b.serves(sinks=torch.zeros(1, 2))
    assert not b.serves(order="n k d p")
    assert not b.serves(pools={name: x.half() for name, x in b.pools.items()})
    assert not b.serves(pools=b.pools | {"k_scale": torch.ones(1)})


def test_padding_alone_becomes_zero() -> None:
    b = Batch(9, 1, 2, 64, "n p k d")
    step = replace(b.step, lengths_S=torch.zeros(1, dtype=torch.int32))
    out = lone_token.attend(b.q, b.new, b.rope, b.pools, b.order, step, b.spec, None)
    assert not out.any()
