"""Qwen3: the norms of the heads of q and k, wherever they are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels_triton.ops import TorchOps
from octavo.models.interface import Rope, Step
from octavo.models.qwen3 import Heads
from octavo.models.taps import TappedOps, Taps


class CountingOps(TorchOps):
    norms = 0

    def qk_norm(self, *args: Any) -> Any:
        self.norms += 1
        return super().qk_norm(*args)


def random(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32))


def heads_of(ops: Any) -> tuple[Heads, tuple[torch.Tensor, torch.Tensor, float]]:
    norm = (random(8), random(8) + 2, 1e-6)
    return Heads(ops, {"q": random(3, 2, 2, 8), "k": random(3, 2, 8), "v": random(3, 2, 8) + 1}, norm), norm


def test_heads_are_normed_once_when_a_layout_reads_them() -> None:
    ops = CountingOps()
    heads, norm = heads_of(ops)
    q, k, _ = heads["unnormed"]
    assert heads["v"] is heads["v"] and not ops.norms
    for got, want in zip((heads["q"], heads["k"], heads["q"]), (*ops.qk_norm(q, k, *norm), heads["q"])):
        torch.testing.assert_close(got, want)
    assert ops.norms == 2
    assert heads.get("sinks") is None
    with pytest.raises(KeyError, match="latent"):
        heads["latent"]


def test_norms_on_the_way_are_those_before_and_show_among_the_taps() -> None:
    ops = TorchOps()
    heads, norm = heads_of(ops)
    at, none = torch.arange(3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    step = Step(none, none, none, none, at, at, none, none, none, False, {}, {})
    rope = Rope(torch.zeros(3, 4), random(3, 4).cos(), random(3, 4).sin())

    def written(ops: Any, q: Any, k: Any, norm: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        pools = {name: torch.zeros(4, 4, 2, 8) for name in "kv"}
        return ops.rope_write(q, {"k": k, "v": heads["v"]}, rope, pools, "n p k d", step, norm)

    taps = Taps(("*",))
    tapped = TappedOps(ops, taps, "layer.0", {"q_norm": norm[0], "k_norm": norm[1]})
    want = written(ops, heads["q"], heads["k"], None)
    for q, pools in (written(ops, *heads["unnormed"]), written(tapped, *heads["unnormed"])):
        assert torch.equal(q, want[0]) and all(torch.equal(pools[name], want[1][name]) for name in "kv")
    assert list(taps.found) == [f"layer.0.{name}" for name in ("q_norm", "k_norm", "rope", "rope.k", "rope.v")]
    assert torch.equal(taps.found["layer.0.q_norm"], heads["q"])
