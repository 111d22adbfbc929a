"""Experts' products in Mosaic GPU: in Pallas' GPU interpreter against float64, and lowered for an H200.

The interpreter fills what a kernel does not write with nan.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.test_experts import CASES, case_of
from kernels.test_pallas_experts import shapes
from tolerances import tolerance

from octavo.kernels_pallas import expert_kernels, experts, mosaic_experts, mosaic_gpu
from octavo.kernels_pallas.mosaic_experts import LARGE, SMALL, Sizes
from octavo.kernels_pallas.mosaic_prefill import interpreter

# rows of each of five experts; at the end tokens of none
COUNTS = {
    "around a block": [1, 0, 129, 63, 8],
    "around a half": [64, 65, 0, 127, 128],
    "all in the last": [0, 0, 0, 0, 200],
    "one row": [0, 0, 1, 0, 0],
}
RAGGED = {name: [[x] for x, n in enumerate(counts) for _ in range(n)] + [[5]] * 3 for name, counts in COUNTS.items()}
RAGGED |= {name: CASES[name] for name in ("none at all", "some none", "uneven", "many in two")}


def run(case: tuple[Any, ...], ids: Any, sizes: Sizes, dtype: Any = jnp.bfloat16, **options: Any) -> jax.Array:
    x, w, up, down, _ = case
    x, up, down = (jnp.asarray(a, dtype) for a in (x, up, down))
    given = x, w, np.array(ids, np.int32), up, down
    return mosaic_experts.experts(*given, sizes=sizes, interpret=interpreter(**options), num_programs=2)


def poisoned(ids: Any, dtype: str, embed_dim: int = 256, size: int = 128) -> tuple[Any, ...]:
    """A case in which what nobody may read is nan: weights of unchosen experts, and tokens of no expert."""
    x, w, up, down, want = case_of(ids, embed_dim, size, poisoned=True, dtype=dtype)
    x[(np.array(ids) == 5).all(1)] = np.nan
    return x, w, up, down, want


# the interpreter takes 15 s for each
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [LARGE, SMALL], ids=lambda s: f"{s.rows} rows")
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_counts_equal_float64(name: str, sizes: Sizes) -> None:
    case = poisoned(RAGGED[name], "bfloat16")
    got = run(case, RAGGED[name], sizes)
    np.testing.assert_allclose(got, case[-1], rtol=0, atol=tolerance("bfloat16", "experts"))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [LARGE, SMALL], ids=lambda s: f"{s.rows} rows")
def test_several_tiles_of_columns_in_float16(sizes: Sizes) -> None:
    ids = [[3]] * 70 + [[1]] * 9
    case = poisoned(ids, "float16", 512, 384)
    got = run(case, ids, sizes, jnp.float16)
    np.testing.assert_allclose(got, case[-1], rtol=0, atol=tolerance("float16", "experts"))


@pytest.mark.slow
def test_there_is_no_race() -> None:
    ids = RAGGED["around a block"]
    run(poisoned(ids, "bfloat16"), ids, LARGE, detect_races=True).block_until_ready()
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("most", [0, expert_kernels.MOST_PAIRS], ids=["argsort", "comparing"])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("name", RAGGED)
def test_blocks_hold_every_pair_of_an_expert_once(
    name: str, rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_kernels, "MOST_PAIRS", most)
    ids = np.array(RAGGED[name], np.int32)
    found = jax.tree.map(np.asarray, jax.jit(mosaic_experts.lay_out, static_argnums=(1, 2))(ids, 5, rows))
    flat, tokens, seen = ids.reshape(-1), np.arange(ids.size) // ids.shape[1], []
    assert (found.token_R[found.row_P] == tokens)[flat < 5].all()
    count = int(found.count_1[0])
    assert count <= len(found.expert_B)
    blocks = list(zip(found.expert_B, found.first_B, found.end_B, strict=True))[:count]
    for expert, first, end in blocks:
        assert first % 8 == 0 and 0 < end - first <= rows and first + rows <= len(found.token_R)
        assert (flat[np.isin(found.row_P, range(first, end)) & (flat < 5)] == expert).all()
        seen += range(first, end)
    assert sorted(seen) == sorted(found.row_P[flat < 5])
    # what a block writes, rounded up to eights, is no other block's
    written = [row for _, first, end in blocks for row in range(first, -(-end // 8) * 8)]
    assert len(set(written)) == len(written)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sizes", [LARGE, SMALL], ids=lambda s: f"{s.rows} rows")
def test_kernels_lower_for_an_h200(sizes: Sizes, dtype: Any) -> None:
    # a newer JAX asks which card it lowers for
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = mosaic_experts.experts.trace(*shapes(1536, dtype), sizes=sizes)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((4, 320, 2, 128), "bfloat16", "sizes of 320 and 128 are not multiples of 256 and 128"),
        ((4, 256, 2, 96), "bfloat16", "sizes of 256 and 96"),
        ((4, 256, 2, 128), "float32", "bfloat16 or float16, not float32"),
    ],
)
def test_what_is_not_served_is_said(shape: tuple[int, ...], dtype: str, words: str) -> None:
    up, down = (jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in (shape, (shape[0], shape[3], shape[1])))
    ids, x = jax.ShapeDtypeStruct((9, 2), jnp.int32), jax.ShapeDtypeStruct((9, shape[1]), jnp.float32)
    with pytest.raises(NotImplementedError, match=words):
        mosaic_experts.experts.trace(x, ids, ids, up, down)


@pytest.mark.parametrize(("least", "hopper", "taken"), [(64, True, True), (65, True, False), (64, False, False)])
def test_a_gpu_takes_them_from_so_many_rows_on(
    least: float, hopper: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "MOSAIC_ROWS", least)
    monkeypatch.setattr(mosaic_gpu, "is_hopper", lambda: hopper)
    monkeypatch.setattr(mosaic_experts, "experts", lambda *args, **options: "mosaic")
    monkeypatch.setattr(expert_kernels, "experts", lambda *args: "triton")
    monkeypatch.setattr(jax, "local_devices", lambda: [type("Device", (), {"core_count": 132})])
    # 1024 tokens, 8 of 128 experts each
    assert experts.by_kernels(*shapes(1024, jnp.bfloat16)) == ("mosaic" if taken else "triton")
    assert experts.WAYS["gpu"] is experts.by_kernels
