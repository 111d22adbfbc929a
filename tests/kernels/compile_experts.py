"""Compiles every kernel of mixtures of experts for sm_90, without a GPU: prints each with bytes of shared memory."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels_triton import expert_blocks, expert_router
from octavo.kernels_triton import expert_kernels as kernels

TYPES = {
    "order": "*i32", "table": "*i32", "ids": "*i32", "counts": "*i32", "firsts": "*i32", "turns": "*i32", "real": "*i1",
    "weights": "*fp32", "bias": "*fp32", "scale": "fp32", "eps": "fp32", "logits_t": "i32", "x_t": "i32",
    "add_t": "i32", "num_pairs": "i32", "num_blocks": "i32",
}  # fmt: skip
# Qwen3-30B-A3B
SHAPE = {"X": 128, "C": 8, "E": 2048, "F": 768}


def compile(
    name: str, kernel: Any, constants: dict[str, Any], warps: int = 4, stages: int = 3, float: str = "*bf16",
    types: dict[str, str] | None = None,
) -> None:  # fmt: skip
    constants = {n: v for n, v in (SHAPE | {"EARLY": True} | constants).items() if n in kernel.arg_names}
    known = TYPES | (types or {})
    signature = {a: "constexpr" if a in constants else known.get(a, float) for a in kernel.arg_names}
    # as a launch would find them: without it, loads are narrow and nothing is pipelined
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if signature[a].startswith("*") or a.endswith("_t")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    print(name, triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)


def compile_product(name: str, cut: kernels.Sizes, direct: bool, float: str) -> None:
    kernel = kernels.up_kernel if name.startswith("up") else kernels.down_kernel
    constants = {"M": cut.rows, "N": cut.columns, "K": cut.depth, "DIRECT": direct, "ADD": True}
    compile(name, kernel, constants, cut.warps, cut.stages, float)


def main() -> None:
    listed = {"XP": 256, "PP": 512, "M": 16, "L": expert_blocks.LISTED}
    flags = {"CP": 8, "SIGMOID": False, "NORMALISE": True, "BIASED": False}
    compile("route", expert_router.route_kernel, listed | flags, 1)
    choose = flags | {"XP": 128, "XB": 4, "EP": 2048, "NORM": True}
    compile("choose", expert_router.choose_kernel, choose)
    wide = {"X": 256, "XP": 256, "XB": 1, "E": 7168, "EP": 8192, "SIGMOID": True, "BIASED": True}
    compile("choose-wide", expert_router.choose_kernel, choose | wide, types={"w": "*fp32", "logits": "*fp32"})
    compile("sort", expert_blocks.sort_kernel, listed | {"R": expert_blocks.RANKED, "K": expert_blocks.COMPARED})
    chunks = {"Q": expert_blocks.CHUNK, "J": expert_blocks.ADDED}
    compile("count", expert_blocks.count_kernel, listed | chunks)
    places = {"R": expert_blocks.PLACED, "K": expert_blocks.COMPARED}
    compile("place", expert_blocks.place_kernel, listed | chunks | places)
    compile("sum", kernels.sum_kernel, {"B": kernels.SUM_TILE, "ADD": True})
    for itemsize, float in ((2, "*bf16"), (4, "*fp32")):
        for pairs in (8, 64, 512, 2048, 6640, 65536):
            for name, cut in zip(("up", "down"), kernels.product_sizes(pairs, 128, itemsize), strict=True):
                compile_product(f"{name}-{pairs}-{itemsize}", cut, pairs <= expert_blocks.FEW_PAIRS, float)


if __name__ == "__main__":
    main()
