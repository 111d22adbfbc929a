"""The engine on a CUDA device, where there is one: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_moe
from backends import BACKENDS
from oracle import greedy
from shapes import Ragged
from tiny import GREEDY, PROMPTS, RANDOM, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine import shared_prefixes
from octavo.engine.backend import get_backend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_the_oracles(backend: str, layout: str) -> None:
    """In fp32, with preemptions and hits."""
    arguments: dict[str, Any] = {"num_gpu_blocks_override": 15, "max_model_len": 104, "layout": layout}
    llm = engine(backend=backend, device="cuda", dtype="float32", **arguments)
    want = [greedy(spec_of(TINY), numpy_weights(TINY), p, GREEDY.max_tokens) for p in PROMPTS[:6]]
    assert tokens(llm, PROMPTS[:6], GREEDY) == want
    assert tokens(llm, PROMPTS[:6], GREEDY) == want
    assert llm.scheduler.num_preemptions > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_are_those_of_a_cpu(backend: str) -> None:
    """The noise is a hash, so a seed means the same everywhere."""
    params = replace(RANDOM, n=2, max_tokens=8)
    on_gpu = engine(backend=backend, device="cuda", dtype="float32").generate(PROMPTS[:3], params, use_tqdm=False)
    want = [engine(backend="torch", device="cpu").generate(p, params, use_tqdm=False)[0] for p in PROMPTS[:3]]
    for a, b in zip(on_gpu, want, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_runs(backend: str, dtype: str) -> None:
    llm = engine(backend=backend, device="cuda", dtype=dtype)
    assert [len(t) for t in tokens(llm, PROMPTS[:4], GREEDY)] == [GREEDY.max_tokens] * 4


@pytest.mark.skipif("torch" not in BACKENDS, reason="graphs are torch's")
def test_graphs_warm_ones_too_and_no_graphs_give_the_same_tokens() -> None:
    """And nothing is recorded after a warm-up, nor waits for the device."""
    want = tokens(engine(backend="torch", device="cuda", dtype="float32", enforce_eager=True), PROMPTS, GREEDY)
    for warmup in ("lazy", "all"):
        llm = engine(backend="torch", device="cuda", dtype="float32", warmup=warmup)
        before = llm.backend.num_compiles()
        assert tokens(llm, PROMPTS, GREEDY) == want
        assert (llm.backend.num_compiles() == before) == (warmup == "all")
        assert tokens(llm, PROMPTS[:3], replace(GREEDY, logprobs=2, logprob_token_ids=[5, 9])) == want[:3]


SHARES = 4  # of a long table of cases, so that processes share its compiling


@pytest.mark.skipif("torch" not in BACKENDS, reason="kernels of the torch room")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["one-order", "the-other"])
@pytest.mark.parametrize(("dtype", "near"), [("float32", 2e-5), ("bfloat16", 4e-2)])
def test_triton_attention_equals_float64(dtype: str, near: float, turn: int, share: int) -> None:
    """Over the shared cases and the kernels' own, compiled; the orders of a cache take turns."""
    from kernels.test_attention import CASES, ORDERS, attend, expected, make_batch
    from kernels.test_triton_kernels import APART
    from kernels.test_triton_kernels import CASES as MORE

    backend = get_backend("torch", {"device": "cuda", "dtype": dtype, "attention": "triton", "eager": True})
    for i, case in list(enumerate((*CASES, *MORE, *APART)))[share::SHARES]:
        batch, order = make_batch(case), ORDERS[(i // SHARES + turn) % 2]
        out, want = attend(backend, batch, order).astype(np.float64), expected(batch)
        np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=near, err_msg=f"{case.name} {order}")
        assert not out[len(want) :].any(), case.name


EDGES = Ragged("edges", (0, 50, 77, 300, 1000, 511), (37, 1, 130, 200, 16, 2), 2, 4, 128, 128, 16, 9)


@pytest.mark.skipif("torch" not in BACKENDS, reason="kernels of the torch room")
@pytest.mark.parametrize(
    "case",
    [
        EDGES,
        replace(EDGES, name="sinks-of-3", group_size=3, sinks=True),
        replace(EDGES, name="groups-of-1", group_size=1, block_size=8),
        replace(EDGES, name="groups-of-5-64", group_size=5, k_dim=64, v_dim=64, block_size=128, spare_width=0),
        replace(EDGES, name="turns", computed=(0, 129), counts=(300, 260), kv_heads=8, group_size=8, block_size=32),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize(("dtype", "near"), [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_prefill_on_hopper_equals_float64(
    dtype: str, near: float, case: Ragged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends within blocks and within tiles of keys, cached prefixes, groups that fill no tile, more than one turn."""
    import torch
    from kernels.test_attention import ORDERS, attend, expected, make_batch

    from octavo.kernels_triton import hopper_prefill

    if not hopper_prefill.is_hopper(torch.device("cuda")):
        pytest.skip("no Hopper GPU")
    launched, launch = [], hopper_prefill.launch
    monkeypatch.setattr(hopper_prefill, "launch", lambda *args: (launched.append(args), launch(*args)))
    backend = get_backend("torch", {"device": "cuda", "dtype": dtype, "attention": "triton", "eager": True})
    for order in ORDERS:
        batch = make_batch(case)
        out, want = attend(backend, batch, order).astype(np.float64), expected(batch)
        np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=near, err_msg=order)
        assert not out[len(want) :].any()
    assert len(launched) == len(ORDERS)


@pytest.mark.skipif("torch" not in BACKENDS, reason="kernels of the torch room")
@pytest.mark.parametrize(("codes", "scaled"), [("int8", True), ("float8_e4m3fn", True), ("float8_e4m3fn", False)])
@pytest.mark.parametrize(("dtype", "near"), [("float32", 2e-5), ("bfloat16", 4e-2)])
def test_triton_reads_caches_of_8_bits(dtype: str, near: float, codes: str, scaled: bool) -> None:
    import torch
    from kernels.test_triton_narrow import RAGGED, check

    backend = get_backend("torch", {"device": "cuda", "dtype": dtype, "attention": "triton", "eager": True})
    for i, case in enumerate(RAGGED):
        check(case, ("n p k d", "n k p d")[i % 2], getattr(torch, codes), scaled, backend, near)


@pytest.mark.skipif("torch" not in BACKENDS, reason="kernels of the torch room")
def test_products_of_few_rows_equal_float64_and_themselves() -> None:
    """Compiled, in bfloat16: splits are added up in one order, whoever comes last."""
    import torch

    from octavo.kernels_triton import few_rows

    g = torch.Generator("cuda").manual_seed(0)
    for rows, depth, width, gate, add, tile in (
        (1, 2048, 1024, False, True, (16, 64, 128, 8, 4, 4, 256)),
        (13, 3072, 1000, False, True, (16, 64, 128, 8, 4, 4, 256)),
        (16, 1024, 6144, True, False, (16, 64, 128, 2, 4, 4, 0)),
        (50, 1000, 640, True, False, (64, 32, 64, 4, 4, 3, 64)),
    ):
        x, w = (torch.randn(n, generator=g, device="cuda").bfloat16() for n in ((rows, depth), (depth, width)))
        rest = torch.randn((rows, width // (1 + gate)), generator=g, device="cuda").bfloat16()
        want = x.double() @ w.double() / depth**0.5
        if gate:
            want = torch.nn.functional.silu(want[:, : width // 2]) * want[:, width // 2 :]
        w, found = (w.double() / depth**0.5).bfloat16(), []
        for _ in range(3):
            found.append(few_rows.product(x, w, few_rows.Tiling(*tile), gate, rest.clone() if add else None))
        want = want + rest.double() if add else want
        assert float((found[0].double() - want).norm() / want.norm()) < 1e-2
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.skipif("torch" not in BACKENDS, reason="kernels of the torch room")
def test_products_with_a_measured_algorithm_equal_float64() -> None:
    """Every rule of the table for this device and library; outputs poisoned, rows of x apart."""
    import torch

    from octavo.kernels_triton import cublas

    device = torch.device("cuda", 0)
    for (depth, width, first, add), rules in cublas.device_table(device).items():
        g = torch.Generator("cuda").manual_seed(depth + width)
        shape = (depth, width) if first else (width, depth)
        w = torch.randn(shape, generator=g, device="cuda").mul_(depth**-0.5).bfloat16()
        plain = w.double() if first else w.double().t()
        for rows, config in rules.items():
            if config is None:
                continue
            x = torch.randn((rows, depth + 64), generator=g, device="cuda").bfloat16()[:, :depth]
            rest = torch.randn((rows, width), generator=g, device="cuda").bfloat16()
            want = x.double() @ plain + (rest.double() if add else 0)
            poison = torch.full_like(rest, float("nan"))
            del poison
            found = [cublas.product(x, w, 1, first, rest.clone() if add else None) for _ in range(2)]
            assert found[0] is not None and found[1] is not None, (depth, width, rows, config)
            assert float((found[0].double() - want).norm() / want.norm()) < 1e-2
            assert torch.equal(found[0], found[1])


@pytest.mark.skipif("torch" not in BACKENDS, reason="kernels of the torch room")
def test_products_of_very_few_rows_equal_float64() -> None:
    """As this device cuts them, compiled, in bfloat16."""
    import torch

    from octavo.kernels_triton import columns

    g = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device="cuda").bfloat16()

    for rows, rules in columns.CUTS.get(torch.cuda.get_device_name(), {}).items():
        for (depth, width, gate), cut in rules.items():
            x, w, scale = random(rows, depth), random(depth, width) * depth**-0.5, random(depth)
            rest = None if gate else random(rows, width)
            want = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale.double()
            want = want @ w.double()
            if gate:
                want = torch.nn.functional.silu(want[:, : width // 2]) * want[:, width // 2 :]
            want = want if rest is None else want + rest.double()
            poison = torch.full_like(want, float("nan"), dtype=torch.bfloat16)
            del poison
            weight = w.t().contiguous() if cut.turned else w
            out = columns.product(x, weight, cut, (scale, 1e-6), gate, rest)
            assert float((out.double() - want).norm() / want.norm()) < 1e-2, (depth, width, gate)


@pytest.mark.skipif("torch" not in BACKENDS, reason="kernels of the torch room")
def test_a_lone_token_equals_float64() -> None:
    """Compiled, in bfloat16: heads normed and turned, its key and value written, attention over them."""
    import torch
    from kernels.test_lone_token import Batch

    from octavo.kernels_triton import lone_token
    from octavo.models.interface import Rope

    def there(x: torch.Tensor) -> torch.Tensor:
        return x.cuda().bfloat16() if x.is_floating_point() else x.cuda()

    for length, heads, group, order in (
        (1, 8, 2, "n p k d"),
        (130, 8, 4, "n p k d"),
        (700, 4, 4, "n k p d"),
        (2500, 2, 1, "n p k d"),
    ):
        b = Batch(length, heads, group, 128, order)
        new_k, want = b.want(normed=True)
        pools, new = ({name: there(x) for name, x in tree.items()} for tree in (b.pools, b.new))
        step = replace(b.step, **{name: there(getattr(b.step, name)) for name in
                                  ("blocks_T", "offsets_T", "lengths_S", "block_tables_SB")})  # fmt: skip
        rope = Rope(b.rope.inv_freq_D, b.rope.cos_TD.cuda(), b.rope.sin_TD.cuda())
        norm, q = (there(b.norm[0]), there(b.norm[1]), 1e-6), there(b.q)
        assert lone_token.serves(q, new, rope, pools, order, step, b.spec, None)
        out = lone_token.attend(q, new, rope, pools, order, step, b.spec, norm)
        np.testing.assert_allclose(out[0].double().cpu().numpy(), want, rtol=0, atol=4e-2)
        at, offset = int(b.step.blocks_T), int(b.step.offsets_T)
        key = pools["k"][at, offset] if order == "n p k d" else pools["k"][at, :, offset]
        np.testing.assert_allclose(key.double().cpu().numpy(), new_k, rtol=0, atol=4e-2)


@pytest.mark.parametrize(("dtype", "near"), [("float32", 2e-5), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_prefixes_equal_float64(backend: str, dtype: str, near: float) -> None:
    """Read once and joined, compiled; also with full tiles of the widest common heads."""
    from kernels.test_attention import ORDERS, attend, expected, make_batch
    from shapes import SHARED

    options: dict[str, Any] = {"torch": {"device": "cuda", "attention": "triton", "eager": True},
                               "jax": {"attention": "triton_lowered"}}[backend]  # fmt: skip
    subject = get_backend(backend, options | {"dtype": dtype})
    wide = {"k_dim": 128, "v_dim": 128, "group_size": 4, "block_size": 16}
    many = next(c for c in SHARED if c.name == "shared-many")
    names = ("shared-by-groups", "shared-softcap-sinks", "shared-mixed-sinks", "shared-long")
    cases = [replace(many, name="shared-wide", **wide, computed=tuple(n + 60 for n in many.computed), kv_heads=2)]
    for i, case in enumerate(cases + [c for c in SHARED if c.name in names]):
        batch = make_batch(case)
        out, want = attend(subject, batch, ORDERS[i % 2]).astype(np.float64), expected(batch)
        np.testing.assert_allclose(out[: len(want)], want, rtol=0, atol=near, err_msg=case.name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_do_not_depend_on_shared_prefixes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prefixes, "LEAST_OF_GROUP", 1)
    monkeypatch.setattr(shared_prefixes, "PADDING", 0)
    arguments: dict[str, Any] = {"backend": backend, "device": "cuda", "dtype": "float32", "max_num_seqs": 8}
    llm = engine(**arguments)
    assert llm.runner.prefixes is not None
    assert tokens(llm, PROMPTS, GREEDY) == tokens(engine(**arguments, disable_cascade_attn=True), PROMPTS, GREEDY)


@pytest.mark.skipif("torch" not in BACKENDS, reason="kernels of the torch room")
def test_triton_experts_equal_float64_over_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, in fp32, whatever their scratch arrays held before."""
    import torch
    from guarded_triton import hostile
    from kernels.test_experts import CASES, case_of

    from octavo.kernels_triton import expert_kernels

    monkeypatch.setattr(torch, "empty", hostile)
    for name, ids in CASES.items():
        *arrays, want = case_of(ids, poisoned=True)
        x, w, up, down = (torch.from_numpy(a).cuda() for a in arrays)
        out = expert_kernels.experts(x, w, torch.tensor(ids, dtype=torch.int32).cuda(), up, down, None, torch.float32)
        np.testing.assert_allclose(out.cpu(), want, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.skipif("jax" not in BACKENDS, reason="kernels of the JAX room")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["one-cut", "the-other"])
def test_mosaic_experts_equal_float64(turn: int, share: int) -> None:
    """Compiled, over ragged counts, what nobody may read being nan; the cuts into tiles take turns."""
    from kernels.test_mosaic_experts import RAGGED, jnp, mosaic_experts, mosaic_gpu, poisoned
    from tolerances import tolerance

    if not mosaic_gpu.is_hopper():
        pytest.skip("kernels for Hopper")
    for i, (name, ids) in list(enumerate(RAGGED.items()))[share::SHARES]:
        x, w, up, down, want = poisoned(ids, "bfloat16")
        x, up, down = (jnp.asarray(a, "bfloat16") for a in (x, up, down))
        sizes = (mosaic_experts.LARGE, mosaic_experts.SMALL)[(i // SHARES + turn) % 2]
        got = mosaic_experts.experts(x, w, np.array(ids, np.int32), up, down, sizes=sizes, num_programs=132)
        message = f"{name}, {sizes}"
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance("bfloat16", "experts"), err_msg=message)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_a_mixture_of_experts_are_the_oracles(backend: str) -> None:
    """In fp32, with chunks and hits, one request alone and several."""
    llm = tiny_moe.engine(backend=backend, device="cuda", dtype="float32", max_num_batched_tokens=32)
    want = [greedy(tiny_moe.spec(), tiny_moe.weights(), p, GREEDY.max_tokens) for p in PROMPTS[:5]]
    assert tokens(llm, PROMPTS[:1], GREEDY) == want[:1]
    assert tokens(llm, PROMPTS[:5], GREEDY) == want
