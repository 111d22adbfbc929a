"""The Triton kernels: in the interpreter against float64 over ragged cases, and compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import attention_batches
import numpy as np
import pytest
import torch
from kernels.test_attention import attend, backend_of, expected, make_batch
from shapes import DECODE, MIXED, PREFILL, SHARED, Ragged
from tolerances import tolerance

from octavo.engine import shared_prefixes
from octavo.kernels_triton import fused, greatest, hopper_prefill, triton_attention
from octavo.kernels_triton.arrivals import counters
from octavo.kernels_triton.ops import TorchOps
from octavo.models.interface import AttentionSpec, Rope, Step

pytestmark = pytest.mark.usefixtures("guarded")

CASES = (
    replace(DECODE, name="decode-split", computed=(700, 0, 63, 64, 65), counts=(1,) * 5, k_dim=64, v_dim=64),
    replace(DECODE, name="decode-split-window", computed=(900, 5), counts=(1, 1), window=300, kv_heads=1),
    replace(DECODE, name="decode-split-sinks", computed=(400, 3), counts=(1, 1), sinks=True, softcap=5.0, kv_heads=1),
    replace(DECODE, name="decode-80", computed=(30, 31, 32, 33), counts=(1,) * 4, k_dim=80, v_dim=80, block_size=32),
    replace(DECODE, name="decode-256", computed=(40,), counts=(1,), k_dim=256, v_dim=256, group_size=8, kv_heads=1),
    replace(DECODE, name="decode-one-group", computed=(15, 16), counts=(1, 1), k_dim=128, v_dim=128, group_size=1),
    replace(MIXED, name="mixed-96", k_dim=96, v_dim=96, block_size=32, group_size=5, kv_heads=1),
    replace(MIXED, name="mixed-128", k_dim=128, v_dim=128, block_size=16, group_size=4, kv_heads=1, padding=70),
    replace(MIXED, name="mixed-256-window", k_dim=256, v_dim=256, group_size=2, kv_heads=1, window=24, sinks=True),
    replace(PREFILL, name="prefill-64", k_dim=64, v_dim=64, group_size=8, kv_heads=1, padding=100),
    replace(PREFILL, name="all-single-but-one", computed=(9, 9, 40), counts=(1, 1, 2)),
    *SHARED[6:8],
    *SHARED[-2:],
)


@pytest.mark.parametrize("order", ["n p k d", "n k p d"], ids=["token-major", "head-major"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_attention_equals_float64_and_writes_every_row(case: Ragged, order: str) -> None:
    batch = make_batch(case)
    out, want = attend(backend_of("torch", "triton"), batch, order), expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("float32", "attention"))
    # padding is defined, so that no nan spreads from it
    assert not out[len(want) :].any()


@pytest.mark.parametrize("counts", [(1,) * 12, (1, 1, 3, 0, *(1,) * 8)], ids=["decode", "mixed"])
def test_long_sequences_go_first_in_a_large_launch(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "num_processors", lambda device: 1)
    computed = (5, 40, 9, 3, 17, 0, 33, 9, 1, 21, 8, 64)
    batch = make_batch(replace(DECODE if counts[2] == 1 else MIXED, computed=computed, counts=counts))
    step = attention_batches.make_step(batch, backend_of("torch", "triton"))
    order = triton_attention.plan(step, batch.spec, 8).order_S
    assert (step.lengths_S[order.long()].diff() <= 0).all() and order.sort().values.tolist() == [*range(len(counts))]
    out, want = attend(backend_of("torch", "triton"), batch, "n p k d"), expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("float32", "attention"))


APART = (
    replace(DECODE, name="blocks-of-8"),
    replace(DECODE, name="blocks-of-24", block_size=24, padding=40),
    replace(DECODE, name="window-sinks-cap", computed=(900, 5, 300), counts=(1,) * 3, window=300, sinks=True,
            softcap=5.0, kv_heads=1, block_size=16),
    replace(DECODE, name="heads-of-80", computed=(30, 31, 32, 33), counts=(1,) * 4, k_dim=80, v_dim=80, block_size=32),
    replace(MIXED, name="mixed", k_dim=128, v_dim=128, block_size=16, group_size=4, kv_heads=1, padding=70),
    replace(SHARED[0], name="prefixes"),
    replace(SHARED[-1], name="long-prefixes"),
)  # fmt: skip


def set_apart(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode as in 16 bits, in which Triton's interpreter multiplies wrongly."""
    tiling = triton_attention.Tiling(16, keys, 2, 5, apart=True)
    monkeypatch.setattr(triton_attention, "decode_tiling", lambda spec, dtype, cache: tiling)


@pytest.mark.parametrize("keys", [32, 64])
@pytest.mark.parametrize("case", APART, ids=lambda c: c.name)
def test_warps_have_keys_of_their_own(case: Ragged, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_apart(keys, monkeypatch)
    batch = make_batch(case)
    out, want = attend(backend_of("torch", "triton"), batch, "n k p d"), expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("float32", "attention"))
    assert not out[len(want) :].any()


def test_which_decode_has_warps_with_keys_of_their_own() -> None:
    """16 bits, as far as registers hold the values of a group once a warp."""
    half, single, codes = torch.bfloat16, torch.float32, torch.int8

    def apart(group: int, dim: int, dtype: torch.dtype = half, cache: torch.dtype = half) -> bool:
        return triton_attention.decode_tiling(AttentionSpec(2, group, dim, dim, 0.1), dtype, cache).apart

    assert apart(1, 16) and apart(16, 128) and apart(4, 128, torch.float16, torch.float16)
    assert not (apart(17, 128) or apart(4, 192) or apart(4, 128, single, single) or apart(4, 128, half, codes))


SPLIT = replace(DECODE, computed=(700, 0, 63, 64, 65, 330), counts=(1, 1, 1, 0, 1, 1), k_dim=64, v_dim=64)


@pytest.mark.parametrize(
    ("within", "at_once", "warps"),
    [(True, 1, False), (True, 2048, False), (False, 1, False), (True, 2048, True)],
    ids=["within", "by-4", "apart", "by-4-warps-apart"],
)
@pytest.mark.parametrize(
    "case",
    [
        replace(SPLIT, name="split"),
        replace(SPLIT, name="split-window", window=100, group_size=1),
        replace(SPLIT, name="split-sinks-80", sinks=True, k_dim=80, v_dim=80, group_size=7, kv_heads=1),
        replace(SPLIT, name="split-mixed", counts=(1, 1, 3, 0, 1, 1), group_size=4, padding=40),
        SHARED[0],
    ],
    ids=lambda c: c.name,
)
def test_splits_are_put_together(
    case: Ragged, within: bool, at_once: int, warps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last to arrive, or apart; of some sequences all, of others one, a few at a time. Twice the same bits."""
    for name, value in (("LEAST_KEYS", 32), ("LEAST_APART", 32), ("AT_ONCE", at_once)):
        monkeypatch.setattr(triton_attention, name, value)
    monkeypatch.setattr(triton_attention, "sums_within", lambda programs, device: within)
    monkeypatch.setattr(triton_attention, "num_processors", lambda device: 32)
    if warps:
        set_apart(32, monkeypatch)
    batch = make_batch(case)
    out, again = (attend(backend_of("torch", "triton"), batch, "n p k d") for _ in range(2))
    want = expected(batch)
    np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=tolerance("float32", "attention"))
    np.testing.assert_array_equal(out, again)
    assert not out[len(want) :].any() and not counters(torch.device("cpu")).any()


@pytest.mark.parametrize(
    ("programs", "splits"), [(8, 64), (32, 16), (64, 8), (132, 4), (136, 3), (256, 2), (264, 2), (272, 1)]
)
def test_busy_devices_split_long_contexts_alone(programs: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 132 multiprocessors: as many splits as fill them, of few keys only where some would have nothing to do."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(triton_attention, "num_processors", lambda device: 132)
    assert triton_attention.sums_within(programs, cpu) == (programs >= 64)
    least = triton_attention.least_keys(programs, True, cpu)
    assert least == (64 if programs <= 132 else 1024) and triton_attention.least_keys(programs, False, cpu) == 128
    assert triton_attention.num_splits(programs, 4352, least, cpu) == splits
    assert triton_attention.num_splits(programs, least, least, cpu) == 1


def test_prefill_for_hopper_serves_what_its_tiles_and_copies_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "is_hopper", lambda device: True)
    spec = AttentionSpec(2, 4, 128, 128, 0.1)
    qkv = torch.zeros(3, 2, 6, 128, dtype=torch.bfloat16)
    q, pool = qkv[:, :, :4], torch.zeros(5, 16, 2, 128, dtype=torch.bfloat16)
    assert hopper_prefill.serves(q, pool, pool, 16, spec, scaled=False)
    assert not hopper_prefill.serves(q, pool, pool, 16, spec, scaled=True)
    assert not hopper_prefill.serves(q, pool, pool, 256, spec, scaled=False)
    assert not hopper_prefill.serves(q.float(), pool.float(), pool.float(), 16, spec, scaled=False)
    assert not hopper_prefill.serves(q, pool.to(torch.float8_e4m3fn), pool, 16, spec, scaled=False)
    for other in (replace(spec, window=64), replace(spec, softcap=5.0), replace(spec, k_dim=96, v_dim=96)):
        assert not hopper_prefill.serves(q, pool, pool, 16, other, scaled=False)
    # rows that do not begin at multiples of 16 bytes
    odd = torch.zeros(3, 2, 4, 132, dtype=torch.bfloat16)[..., :128]
    assert not hopper_prefill.serves(odd, pool, pool, 16, spec, scaled=False)
    assert [hopper_prefill.queries(group) for group in (1, 3, 4, 64)] == [128, 32, 32, 2]


def test_programs_on_hopper() -> None:
    """As many as multiprocessors where tiles are shared out, else as many as tiles, of 32 sequences at most."""
    assert triton_attention.hopper_programs(256, 1, 8, 132) == 132
    assert triton_attention.hopper_programs(256, 2, 8, 132) == 8 * 258
    assert triton_attention.hopper_programs(256, 256, 8, 132) == 8 * 288


def test_a_tile_of_a_shared_prefix_has_as_many_members_as_the_step_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "TILE", 4)
    test_attention_equals_float64_and_writes_every_row(SHARED[4], "n p k d")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 80), (5, 4096), (4, 2, 96)], ids=str)
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    x, y = (torch.from_numpy(rng.standard_normal(shape)).to(dtype) for _ in range(2))
    scale = torch.from_numpy(rng.uniform(0.5, 1.5, shape[-1])).to(dtype)
    near = tolerance("float32", "op") if dtype == torch.float32 else 4e-3

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()

    torch.testing.assert_close(fused.rms_norm(x, scale, 1e-5).double(), norm(x), rtol=near, atol=near)
    total, out = fused.add_rms_norm(x, y, scale, 1e-5)
    torch.testing.assert_close(total, x + y, rtol=0, atol=0)
    torch.testing.assert_close(out.double(), norm(x + y), rtol=near, atol=near)


def views(rng: np.random.Generator, num_tokens: int, heads: int, group: int, dim: int) -> Iterator[torch.Tensor]:
    """q, k and v as a fused product leaves them: views of one array."""
    qkv = torch.from_numpy(rng.standard_normal((num_tokens, heads, group + 2, dim)).astype(np.float32))
    return iter((qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]))


@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 1, 64), (1, 7, 80), (8, 2, 128)])
def test_heads_are_normed_apart(heads: int, group: int, dim: int) -> None:
    rng = np.random.default_rng(1)
    q, k, _ = views(rng, 3, heads, group, dim)
    scales = [torch.from_numpy(rng.uniform(0.5, 1.5, dim).astype(np.float32)) for _ in range(2)]
    for x, scale, out in zip((q, k), scales, fused.qk_norm(q, k, *scales, 1e-6)):
        want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
        torch.testing.assert_close(out.double(), want, rtol=0, atol=tolerance("float32", "op"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7), (1, 5000), (3, 2049), (200, 3100), (2, 1024)])
def test_the_first_of_the_greatest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Also where several are equal, in parts of a row of their own, where all are -inf, and where a row goes on."""
    rng = np.random.default_rng(shape[1])
    # few values: each row has its greatest several times
    whole = torch.from_numpy(rng.integers(-9, 9, (shape[0], shape[1] + 32)).astype(np.float32))
    whole[:, shape[1] :] = float("nan")
    x = whole.to(dtype)[:, : shape[1]]
    np.testing.assert_array_equal(greatest.argmax(x), np.argmax(x.float().numpy(), -1))
    x[0] = -float("inf")
    x[-1, shape[1] - 1] = 10
    out = greatest.argmax(x)
    assert out.dtype == torch.int32 and out[-1] == shape[1] - 1
    assert shape[0] == 1 or out[0] == 0


@pytest.mark.parametrize("size", [33, 1024, 3000])
def test_gate(size: int) -> None:
    x = torch.from_numpy((np.random.default_rng(2).standard_normal((3, 2, size)) * 4).astype(np.float32))
    gate, up = x.double().unbind(1)
    want = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(fused.gated_mlp_act(x).double(), want, rtol=1e-6, atol=tolerance("float32", "op"))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("order", ["n p k d", "n k p d"], ids=["token-major", "head-major"])
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 1, 64), (1, 7, 80), (2, 4, 128)])
def test_rope_and_write(heads: int, group: int, dim: int, order: str, norm: bool) -> None:
    """Against the plain formulas in float64; every other slot keeps what it held."""
    rng, size, num_tokens = np.random.default_rng(3), 4, 5
    q, k, v = views(rng, num_tokens, heads, group, dim)
    scales = [torch.from_numpy(rng.uniform(0.5, 1.5, dim).astype(np.float32)) for _ in range(2)]
    rope, step, angle = ropes_and_slots(rng, num_tokens, dim, size)
    shape = (6, size, heads, dim) if order == "n p k d" else (6, heads, size, dim)
    pools = [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for _ in range(2)]
    want = [p.double() for p in pools]

    def turned(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x.double()
        if norm:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
        a, b = x.chunk(2, -1)
        cos, sin = (f(angle).view(num_tokens, *(1,) * (x.ndim - 2), -1) for f in (torch.cos, torch.sin))
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    for pool, new in zip(want, (turned(k, scales[1]), v.double())):
        for t, (block, offset) in enumerate(zip(step.blocks_T.tolist(), step.offsets_T.tolist())):
            (pool[block, offset] if order == "n p k d" else pool[block, :, offset])[:] = new[t]
    out = fused.rope_write(q, k, v, rope, *pools, order, step, (*scales, 1e-6) if norm else None)
    for got, expect in zip((out, *pools), (turned(q, scales[0]), *want)):
        torch.testing.assert_close(got.double(), expect, rtol=0, atol=tolerance("float32", "op"))


def ropes_and_slots(rng: np.random.Generator, num_tokens: int, dim: int, size: int) -> tuple[Rope, Step, torch.Tensor]:
    """A rotary table, a step of so many tokens whose slots lie in 6 blocks, and the table's angles."""
    angle = torch.from_numpy(rng.uniform(0, 6, (num_tokens, dim // 2)))
    slots = rng.permutation(6 * size)[:num_tokens]
    blocks, offsets = (torch.from_numpy(x.astype(np.int32)) for x in (slots // size, slots % size))
    empty = torch.zeros(0, dtype=torch.int32)
    step = Step(empty, empty, empty, empty, blocks, offsets, empty, empty, empty, False, {}, {})
    return Rope(angle, angle.cos().float(), angle.sin().float()), step, angle


def test_norms_within_rope_and_write_round_as_the_plain_ops_do() -> None:
    """To the dtype of the arrays between norm and rope, so that but few numbers are one rounding apart."""
    rng, dtype = np.random.default_rng(6), torch.float16
    q, k, v = (x.to(dtype) for x in views(rng, 5, 2, 2, 64))
    scales = [torch.from_numpy(rng.uniform(0.5, 1.5, 64).astype(np.float32)).to(dtype) for _ in range(2)]
    rope, step, _ = ropes_and_slots(rng, 5, 64, 4)
    pools, ops = {name: torch.zeros(6, 4, 2, 64, dtype=dtype) for name in "kv"}, TorchOps()
    want_q, want = ops.rope_write(q, {"k": k, "v": v}, rope, pools, "n p k d", step, (*scales, 1e-6))
    want = {name: x.clone() for name, x in want.items()}
    got = {name: torch.zeros(6, 4, 2, 64, dtype=dtype) for name in "kv"}
    out = fused.rope_write(q, k, v, rope, got["k"], got["v"], "n p k d", step, (*scales, 1e-6))
    for x, y in ((out, want_q), (got["k"], want["k"]), (got["v"], want["v"])):
        assert (x != y).float().mean() < 2e-3


def test_pools_of_more_than_keys_and_values_are_all_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel knows those two alone."""
    q, k, v = views(np.random.default_rng(4), 1, 2, 1, 16)
    pools = {name: torch.zeros(2, 4, 2, 16) for name in "kv"} | {"note": torch.zeros(2, 4, 2)}
    empty, at = torch.zeros(0, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    step = Step(empty, empty, empty, empty, at, at, empty, empty, empty, False, {}, {})
    rope = Rope(torch.zeros(1, 8), torch.ones(1, 8), torch.zeros(1, 8))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    new = {"k": k, "v": v, "note": torch.full((1, 2), 5.0)}
    _, pools = TorchOps().rope_write(q, new, rope, pools, "n p k d", step)
    assert torch.equal(pools["k"][1, 1], k[0]) and pools["note"][1, 1].tolist() == [5.0, 5.0]


def test_every_kernel_compiles_for_hopper() -> None:
    """In a process of its own: here Triton is the interpreter."""
    here = Path(__file__).parent
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(here / "compile_triton.py")], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert set(sizes) == {
        "decode",
        "decode-256",
        "decode-split",
        "decode-shared",
        "reduce",
        "reduce-shared",
        "prefix",
        "prefill",
        "norm",
        "qk_norm",
        "gate",
        "rope_write",
        "rope_write-norm",
        "decode-i8",
        "decode-i8-16",
        "decode-fp8e4nv",
        "prefill-i8",
        "prefill-hopper",
        "prefill-hopper-64",
        "few-rows",
        "few-rows-gate",
        "few-rows-add",
        "columns",
        "columns-gate",
        "lone",
        "lone-norm",
        "lone-reduce",
        "derive",
        "argmax-part",
        "argmax-place",
        "last_rows",
    }
    # a program may have 227 KiB of shared memory there
    assert all(int(shared) <= 227 * 1024 for shared in sizes.values()), sizes
