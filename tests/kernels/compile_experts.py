"""Compiles every kernel of mixtures of experts for sm_90, without a GPU: prints each with bytes of shared memory."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels_triton import expert_kernels as kernels

TYPES = {
    "order": "*i32", "table": "*i32", "ids": "*i32", "starts": "*i32", "real": "*i1", "weights": "*fp32",
    "bias": "*fp32", "scale": "fp32", "logits_t": "i32", "x_t": "i32", "add_t": "i32", "num_pairs": "i32",
    "num_blocks": "i32",
}  # fmt: skip
# Qwen3-30B-A3B
SHAPE = {"X": 128, "C": 8, "E": 2048, "F": 768}


def compile(name: str, kernel: Any, constants: dict[str, Any], warps: int = 4, stages: int = 3, float: str = "*bf16"):
    constants = {n: v for n, v in (SHAPE | constants).items() if n in kernel.arg_names}
    signature = {a: "constexpr" if a in constants else TYPES.get(a, float) for a in kernel.arg_names}
    # as a launch would find them: without it, loads are narrow and nothing is pipelined
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if signature[a] not in ("constexpr", "fp32")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even)
    options = {"num_warps": warps, "num_stages": stages}
    print(name, triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)


def main() -> None:
    listed = {"XP": 256, "PP": 512, "M": 16, "L": kernels.LISTED}
    flags = {"CP": 8, "SIGMOID": False, "NORMALISE": True, "BIASED": False}
    compile("route", kernels.route_kernel, listed | flags, 1)
    compile("sort", kernels.sort_kernel, listed | {"R": kernels.RANKED, "K": kernels.COMPARED})
    compile("table", kernels.table_kernel, listed)
    compile("sum", kernels.sum_kernel, {"B": kernels.SUM_TILE, "ADD": True})
    for itemsize, float in ((2, "*bf16"), (4, "*fp32")):
        for pairs in (8, 8192, 65536):
            first, second = kernels.product_sizes(pairs, 128, itemsize)
            for kernel, s in ((kernels.up_kernel, first), (kernels.down_kernel, second)):
                name, cut = kernel.fn.__name__.split("_")[0], {"M": s.rows, "N": s.columns, "K": s.depth}
                cut["DIRECT"] = pairs <= kernels.FEW_PAIRS
                compile(f"{name}-{pairs}-{itemsize}", kernel, cut, s.warps, s.stages, float)


if __name__ == "__main__":
    main()
