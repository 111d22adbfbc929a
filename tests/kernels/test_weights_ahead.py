"""Weights asked for ahead: in which order, how many bytes, from where; each byte once; and nothing comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from octavo.kernels_triton import fused, weights_ahead
from octavo.kernels_triton.ops import TorchOps
from octavo.kernels_triton.weights_ahead import Ask, Asking
from octavo.models.interface import Rope, Step

# products of a little model: (spec, shape of a row of x, shape of w)
QKV = ("te,ekxd->tkxd", (32,), (32, 2, 3, 8))
OUT = ("tkgd,kgde->te", (2, 1, 8), (2, 1, 8, 32))
DOWN = ("tf,fe->te", (48,), (48, 32))
UNEMBED = ("re,ve->rv", (32,), (640, 32))
MB = 1 << 20


class Asked:
    """What a GPU would be asked for: (first byte, bytes)."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []

    def at(self, place_L: Any, left_L: Any, bulk: Any, keep: Any) -> None:
        place, left = (x.handle.data.astype(np.int64).ravel() for x in (place_L, left_L))
        size = left if bulk else np.where(left > 0, 128, 0)
        self.pieces += [(int(a), int(n)) for a, n in zip(place, size, strict=True) if n > 0]

    def bytes_of(self, weight: torch.Tensor) -> list[int]:
        """Which bytes of it were asked for, each as often as it was."""
        return sorted(
            b for at, size in self.pieces for b in range(at - weight.data_ptr(), at - weight.data_ptr() + size)
        )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    monkeypatch.setattr(weights_ahead, "ask_at", found.at)
    monkeypatch.setattr(weights_ahead, "num_threads", lambda: tl.constexpr(32))
    return found


def weight_of(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize(("num_bytes", "programs"), [(16, 3), (4096, 1), (300_000, 2), (131_072 * 3, 5)])
def test_each_byte_is_asked_for_once(num_bytes: int, programs: int, bulk: bool, asked: Asked) -> None:
    weight = weight_of(num_bytes)
    weights_ahead.launch(Ask(weight, num_bytes, Asking(MB, programs=programs, bulk=bulk)), in_turn=False)
    # of a line, its first byte brings all of it
    end = num_bytes if bulk else -(-num_bytes // 128) * 128
    assert asked.bytes_of(weight) == list(range(end))


@pytest.mark.parametrize("bulk", [True, False])
def test_small_kernels_ask_beside_their_own_work(bulk: bool, asked: Asked) -> None:
    """Norms, the gate, rope: the same results, and each byte asked for once."""
    rng, weight = np.random.default_rng(0), weight_of(200_000)
    ask = Ask(weight, 200_000, Asking(MB, programs=5, bulk=bulk))

    def random(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    x, y, scale, wide = random(3, 96), random(3, 96), random(96), random(2, 2, 1500)
    q, k, v = random(3, 2, 1, 16), random(3, 2, 16), random(3, 2, 16)
    angle, at = random(3, 8), torch.arange(3, dtype=torch.int32)
    step = Step(at, at, at, at, at, at, at, at, at, False, {}, {})

    def turned(ask: Ask | None) -> list[torch.Tensor]:
        pools = [torch.zeros(4, 4, 2, 16) for _ in range(2)]
        return [
            fused.rope_write(q, k, v, Rope(angle, angle.cos(), angle.sin()), *pools, "n p k d", step, None, ask),
            *pools,
        ]

    for op in (
        lambda ask: [fused.rms_norm(x, scale, 1e-5, ask)],
        lambda ask: list(fused.add_rms_norm(x, y, scale, 1e-5, ask)),
        lambda ask: [fused.gated_mlp_act(wide, ask)],
        turned,
    ):
        asked.pieces.clear()
        want = op(None)
        assert not asked.pieces
        for a, b in zip(op(ask), want, strict=True):
            assert torch.equal(a, b)
        found = asked.bytes_of(weight)
        assert found[:200_000] == list(range(200_000)) and len(found) < 200_000 + 128


class Launches:
    """Stands for a GPU's streams: what is asked for, from where, and who waits for whom, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[Any] = []
        self.now = self.main = self.stream("main")
        monkeypatch.setattr(weights_ahead, "launch", self.launch)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream("side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.using)

    def stream(self, name: str) -> Any:
        def wait_stream(self: Any, other: Any) -> None:
            seen.append(f"{self.name} waits for {other.name}")

        seen = self.seen
        return type("Stream", (), {"name": name, "wait_stream": wait_stream})()

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        self.now = stream
        yield
        self.now = self.main

    def launch(self, ask: Ask, in_turn: bool) -> None:
        self.seen.append((ask.weight.data_ptr(), ask.num_bytes, self.now.name, in_turn))


def make(*products: tuple) -> list[tuple[str, tuple, torch.Tensor]]:
    return [(spec, x, torch.zeros(w)) for spec, x, w in products]


def run(ops: TorchOps, products: list[Any], num_rows: int = 2) -> None:
    for spec, shape, w in products:
        ops.einsum(spec, torch.zeros(num_rows, *shape), w, out=(None, None))


def recorded(ops: TorchOps, products: list[Any], num_rows: int = 2) -> None:
    asker = ops.asker
    assert asker
    with asker.learning():
        run(ops, products, num_rows)
    with asker.recording():
        run(ops, products, num_rows)


def use(monkeypatch: pytest.MonkeyPatch, **rule: Any) -> Asking:
    how = Asking(**({"most_bytes": MB} | rule))
    monkeypatch.setitem(weights_ahead.TABLE, "cpu", {4: how})
    return how


def test_a_recording_asks_for_the_weight_of_the_next_product(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, place="between", most_bytes=50_010)
    ops, products, gpu = TorchOps(), make(QKV, OUT, DOWN, QKV, UNEMBED), Launches(monkeypatch)
    recorded(ops, products)
    weights = [w for *_, w in products]
    # op by op, once: so that the kernel is there
    assert gpu.seen[0] == (weights[0].data_ptr(), 0, "main", True)
    # behind the last there is none; of the largest, the beginning
    assert gpu.seen[1:] == [(w.data_ptr(), min(w.nbytes, 50_000), "main", True) for w in weights[1:]]
    gpu.seen.clear()
    # other weights, after a sleep
    products = make(OUT, QKV)
    recorded(ops, products)
    assert [seen[0] for seen in gpu.seen] == [products[1][2].data_ptr()]


def test_what_asks_beside_is_waited_for_at_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, place="beside")
    products, gpu = make(QKV, OUT, DOWN), Launches(monkeypatch)
    recorded(TorchOps(), products)
    asks = [(w.data_ptr(), w.nbytes, "side", False) for *_, w in products[1:]]
    fork = "side waits for main"
    assert gpu.seen[1:] == [fork, asks[0], fork, asks[1], "main waits for side"]


def test_what_asks_within_is_left_to_the_next_small_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    how = use(monkeypatch)
    ops, products, gpu = TorchOps(), make(QKV, OUT, DOWN), Launches(monkeypatch)
    asker, taken = ops.asker, []
    assert asker
    for part in (asker.learning, asker.recording):
        with part():
            for product in products:
                run(ops, [product])
                taken.append(asker.take())
                assert asker.take() is None
    # op by op, the kernel that a recording launches is launched too, and asks for nothing
    assert [(a.num_bytes, a.how) for a in taken[:3]] == [(0, how)] * 3
    assert taken[3].weight.data_ptr() == products[1][2].data_ptr() and taken[3].num_bytes == products[1][2].nbytes
    assert taken[5] is None and not gpu.seen
    with asker.learning():
        run(ops, products[:1])
    assert asker.take() is None


def test_experts_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows which. Behind them, the next product's weight is."""
    use(monkeypatch, place="between")
    ops, (before, behind), gpu = TorchOps(), make(OUT, QKV), Launches(monkeypatch)
    x, gate_up, down = torch.zeros(2, 32), torch.zeros(3, 32, 2, 8), torch.zeros(3, 8, 32)
    asker = ops.asker
    assert asker
    for part in (asker.learning, asker.recording):
        with part():
            run(ops, [before])
            ops.moe(x, torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32), gate_up, down)
            run(ops, [behind])
    assert [seen[:2] for seen in gpu.seen[1:]] == [(behind[2].data_ptr(), behind[2].nbytes)]


def test_without_a_rule_or_with_more_rows_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, products = Launches(monkeypatch), make(QKV, OUT)
    recorded(TorchOps(), products)
    use(monkeypatch, place="beside")
    recorded(TorchOps(), products, num_rows=5)
    # nor where nothing is recorded, but for what compiles the kernel
    run(TorchOps(), products)
    assert all(seen[1] == 0 for seen in gpu.seen)


def test_a_recording_that_differs_from_the_run_before_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, products = TorchOps(), make(QKV, OUT)
    asker = ops.asker
    assert asker
    with asker.learning():
        run(ops, products)
    with pytest.raises(AssertionError, match="differs from the run before"), asker.recording():
        run(ops, products[::-1])
