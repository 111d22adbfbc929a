"""A mesh of torch processes: places, collectives, and ops on local shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from meshes import on_every_rank

from octavo.kernels_triton.ops import TorchOps
from octavo.sharding.mesh_torch import TorchMesh
from octavo.sharding.rules import TENSOR, ShardingRules


def test_ranks_count_row_major() -> None:
    places = on_every_rank(lambda m: (m.place, m.index(("tp", "dp"))), {"dp": 2, "tp": 3})
    assert [list(p.values()) for p, _ in places] == [[r % 3, r // 3] for r in range(6)]
    assert [at for _, at in places] == [r % 3 * 2 + r // 3 for r in range(6)]


def test_a_rank_beyond_the_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 4 is none of a mesh of \{'tp': 4\}"):
        TorchMesh({"tp": 4}, 4, dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]


def test_sums_stay_within_their_axes() -> None:
    def sums(mesh: TorchMesh) -> list[float]:
        return [float(mesh.all_reduce(torch.tensor([10.0**mesh.rank]), n)) for n in (("tp",), ("dp",), ("dp", "tp"))]

    assert on_every_rank(sums, {"dp": 2, "tp": 2}) == [
        [11, 101, 1111], [11, 1010, 1111], [1100, 101, 1111], [1100, 1010, 1111]
    ]  # fmt: skip


def test_shards_lie_side_by_side_and_are_counted() -> None:
    whole = torch.arange(24.0).reshape(2, 12)

    def gathered(mesh: TorchMesh) -> tuple[torch.Tensor, dict]:
        part = whole[:, mesh.index(("dp", "tp")) * 3 :][:, :3]
        return mesh.all_gather(part, ("dp", "tp"), 1), dict(mesh.counts)

    for x, counts in on_every_rank(gathered, {"dp": 2, "tp": 2}):
        assert x.tolist() == whole.tolist()
        assert counts == {("all-gather", ("dp", "tp"), 96): 1}


def test_ops_on_shards_equal_ops_on_the_whole() -> None:
    rng = np.random.default_rng(0)
    table, ids = rng.normal(size=(12, 6)).astype(np.float32), np.array([0, 11, 3, 3, 7])
    up, down = rng.normal(size=(6, 8)).astype(np.float32), rng.normal(size=(8, 6)).astype(np.float32)

    def run(mesh: TorchMesh) -> torch.Tensor:
        ops, at, n = TorchOps(rules=ShardingRules(TENSOR), mesh=mesh), mesh.rank, mesh.size(("tp",))
        own = [torch.tensor(np.split(x, n, axis)[at]) for x, axis in ((table, 0), (up, 1), (down, 0))]
        x = ops.embed(own[0], torch.tensor(ids, dtype=torch.int32))
        y = ops.einsum("tf,fe->te", ops.einsum("te,ef->tf", x, own[1], (None, "mlp")), own[2], (None, None), "mlp")
        logits = ops.einsum("re,ve->rv", y, own[0], (None, "vocab"))
        assert ops.axis_index("mlp") == at and ops.axis_index("layers") == 0
        return ops.constrain(logits, (None, "vocab"), (None, None))

    want = table[ids].astype(np.float64) @ up @ down @ table.T
    for size in (1, 2, 4):
        for got in on_every_rank(run, {"tp": size}):
            np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-5)


def test_a_mesh_axis_that_shares_two_axes_sums_once() -> None:
    rules = ShardingRules({"experts": ("dp", "tp"), "mlp": "tp"})

    def total(mesh: TorchMesh) -> float:
        return float(TorchOps(rules=rules, mesh=mesh).psum(torch.ones(1), "experts", "mlp"))

    assert on_every_rank(total, {"dp": 2, "tp": 2}) == [4.0] * 4
