"""The guard of Triton's interpreter sees what leaves an argument, wherever that leads; and a whole engine behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_moe
import torch
import triton
import triton.language as tl
from oracle import greedy
from tiny import GREEDY, PROMPTS, tokens

from octavo.engine.backend_torch import TorchBackend
from octavo.kernels_triton.ops import TorchOps

pytestmark = pytest.mark.usefixtures("guarded")


@triton.jit
def copy_kernel(x, y, n, first, B: tl.constexpr, MASKED: tl.constexpr):
    i = first + tl.arange(0, B)
    if MASKED:
        tl.store(y + i, tl.load(x + i, mask=(i >= 0) & (i < n)), mask=(i >= 0) & (i < n))
    else:
        tl.store(y + i, tl.load(x + i))


def copy(x: torch.Tensor, y: torch.Tensor, first: int = 0, masked: bool = True) -> None:
    copy_kernel[(1,)](x, y, 10, first, B=16, MASKED=masked)


def test_what_stays_inside_is_done() -> None:
    x, y = torch.arange(10.0), torch.empty(10)
    copy(x, y)
    assert torch.equal(x, y)
    copy(x[:5].clone(), y, first=-11)


@pytest.mark.parametrize(
    ("x", "y", "first", "masked", "what"),
    [
        (9, 10, 0, True, "copy_kernel reads byte 36 of x, (9,) torch.float32 of 36"),
        (10, 9, 0, True, "copy_kernel writes byte 36 of y, (9,) torch.float32 of 36"),
        (16, 16, -1, False, "copy_kernel reads byte -4 of x"),
        (0, 10, 0, True, "copy_kernel reads byte 0 of x"),
    ],
)
def test_what_leaves_an_argument_raises(x: int, y: int, first: int, masked: bool, what: str) -> None:
    """Also where it would still lie in the memory of which the argument is a part."""
    with pytest.raises(Exception, match=r"IndexError") as error:
        copy(torch.zeros(64)[:x], torch.zeros(64)[:y], first, masked)
    assert what in str(error.value)


@triton.jit
def follow_kernel(at, y):
    tl.store(y, tl.load(at))
    tl.store(y + tl.load(at), 1)


def test_what_was_never_written_leads_nowhere() -> None:
    with pytest.raises(Exception, match="follow_kernel writes"):
        follow_kernel[(1,)](torch.empty(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))


def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops take a CPU's tensors for a GPU's, unpacked, so that they choose kernels, which the interpreter runs."""
    monkeypatch.setattr(TorchOps, "prepare", lambda self, weight, spec: weight)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(TorchBackend, "prefetch", lambda self, x: None)


def check(prompts: list[list[int]], max_tokens: int, monkeypatch: pytest.MonkeyPatch, guarded: Any) -> None:
    params = replace(GREEDY, max_tokens=max_tokens)
    want = [greedy(tiny_moe.spec(), tiny_moe.weights(), p, max_tokens) for p in prompts]
    on_kernels(monkeypatch)
    llm = tiny_moe.engine(backend="torch", device="cpu", attention="triton", max_num_batched_tokens=32)
    assert tokens(llm, prompts, params) == want
    assert guarded.seen >= {
        "part_kernel",
        "place_kernel",
        "derive_kernel",
        "rope_write_kernel",
        "prefill",
        "decode",
        "norm_kernel",
    }
    assert guarded.seen >= {"choose_kernel", "sort_kernel", "up_kernel", "down_kernel", "sum_kernel", "gate_kernel"}


def test_an_engine_with_experts(monkeypatch: pytest.MonkeyPatch, guarded: Any) -> None:
    """All kernels of its steps, with padding: nine tokens, then one."""
    check(PROMPTS[:1], 2, monkeypatch, guarded)


# rows that are masked see no keys, and divide nothing by nothing
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.slow
def test_an_engine_with_experts_and_several_requests(monkeypatch: pytest.MonkeyPatch, guarded: Any) -> None:
    """Chunks and hits too."""
    check([*PROMPTS[:3], PROMPTS[4]], 3, monkeypatch, guarded)
    assert "route_kernel" in guarded.seen
