"""Compiles every Triton kernel for sm_90 in bfloat16, without a GPU: prints each with its bytes of shared memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from octavo.engine.shared_prefixes import TILE
from octavo.kernels_triton import (
    attention_kernels,
    column_kernels,
    derive,
    few_rows,
    few_rows_kernels,
    fused,
    greatest,
    hopper_kernels,
    hopper_prefill,
    lone_token,
    shared_prefix,
    triton_attention,
)
from octavo.models.interface import AttentionSpec

SPEC = AttentionSpec(8, 4, 128, 128, 0.1)
INTEGERS = {
    "block",
    "offset",
    "order",
    "tables",
    "lengths",
    "starts",
    "tile_seqs",
    "tile_firsts",
    "num_tiles",
    "blocks",
    "offsets",
    "members",
    "prefixes",
    "turns",
    "tokens",
    "computed",
    "prompts",
    "rows",
    "table",
    "places",
}
FLOATS = {"parts", "peaks", "sums", "tops", "cos", "sin"}
DIMS = {"K": 8, "G": 4, "D": 128, "V": 128, "VP": 128}
STRIDES = {"Q_T": 6144, "Q_K": 768, "Q_G": 128, "K_N": 16384, "K_P": 1024, "K_K": 128}
STRIDES |= {name.replace("K_", "V_", 1): size for name, size in STRIDES.items() if name.startswith("K_")}
ATTENTION = (
    DIMS
    | STRIDES
    | {"FAR": False, "P": 16, "WINDOW": 0, "CAP": 0.0, "SINKS": False, "DP": 128, "PRECISION": "tf32"}
    | {"SCALED": False, "NARROW": False, "APART": False}
)


def compile(
    name: str, kernel: Any, constants: dict[str, Any], num_warps: int = 4, num_stages: int = 3, cache: str = "*bf16"
) -> None:
    def kind(argument: str) -> str:
        if argument == "real_out":
            return "*i1"
        if argument in INTEGERS or argument.endswith("s_out"):
            return "*i32"
        if argument in FLOATS:
            return "*fp32"
        if argument in ("k", "v") and "tables" in kernel.arg_names:
            return cache
        if argument in ("k_scale", "v_scale") and cache != "*bf16":
            return "*fp32"
        if argument in constants:
            return "constexpr"
        return "fp32" if argument in ("eps", "factor") else "i32" if argument.startswith("num_") else "*bf16"

    numbers = {
        "splits",
        "table_s",
        "x_r",
        *(a for a in kernel.arg_names if "_" in a and len(a.split("_")[-1]) == 1 and a.islower()),
    }
    constants = constants | {"EARLY": True}
    signature = {a: "i32" if a in numbers else kind(a) for a in kernel.arg_names}
    if "tables" in signature:
        signature["scale"] = "fp32"
    # as a launch would find them: without it, loads are narrow and nothing is pipelined
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if signature[a] not in ("constexpr", "fp32")
    }
    constants = {a: x for a, x in constants.items() if a in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": "EARLY" in constants}
    print(name, triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)


def compile_for_hopper(name: str, group: int, dim: int, head_major: bool) -> None:
    """The prefill that is written for it: arrays come as descriptors of boxes."""
    kernel, wide, layout = hopper_kernels.prefill, triton.next_power_of_2(group), NVMMASharedLayout(128, 16, 4)
    block = [1, 1, 16, hopper_prefill.ATOM] if head_major else [1, 16, 1, hopper_prefill.ATOM]
    boxes = {"q_desc": [hopper_prefill.queries(group) // 2, 1, wide, dim], "k_desc": block, "v_desc": block}
    constants = {"K": 8, "G": group, "GP": wide, "P": 16, "N": hopper_prefill.KEYS, "D": dim}
    constants |= {"STAGES": hopper_prefill.STAGES, "SINKS": head_major, "HEAD_MAJOR": head_major}
    signature = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(constants, "constexpr")
    signature |= {a: f"tensordesc<bf16{box},{layout!r}>" for a, box in boxes.items()}
    signature |= {"out": "*bf16", "sinks": "*bf16", "factor": "fp32", "table_s": "i32"}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    print(name, triton.compile(source, target=target, options={"num_warps": 4}).metadata.shared)


def main() -> None:
    apart = {"ORDERED": True, "WITHIN": False, "GP": 4, "C": 1}
    for name, cache, dim in (("i8", torch.int8, 128), ("fp8e4nv", torch.float8_e4m3fn, 128), ("i8-16", torch.int8, 16)):
        spec = AttentionSpec(8, 4, dim, dim, 0.1)
        q, k = torch.empty(1, 8, 4, dim, dtype=torch.bfloat16), torch.empty(1, 16, 8, dim, dtype=cache)
        tile = triton_attention.decode_tiling(spec, q.dtype, cache)
        constants = triton_attention.common(q, k, k, "n p k d", spec, (q, q))
        constants = {a: x for a, x in constants.items() if x is not q} | apart | {"M": tile.rows, "N": tile.keys}
        constants |= {"NARROW": True, "APART": False, "SINKS": False, "SPLIT": False, "SHARED": False, "LEAST": 128}
        kind = f"*{name.split('-')[0]}"
        compile(f"decode-{name}", attention_kernels.decode, constants, tile.num_warps, tile.num_stages, kind)
    tile = triton_attention.decode_tiling(SPEC, torch.bfloat16, torch.bfloat16)
    least = {"LEAST": triton_attention.LEAST_APART}
    for name, split, shared in (("decode", False, False), ("decode-split", True, False), ("decode-shared", True, True)):
        constants = ATTENTION | least | {"SPLIT": split, "M": tile.rows, "N": tile.keys, "SHARED": shared}
        constants |= {"ORDERED": not split, "WITHIN": split and not shared, "GP": 4, "C": 4, "APART": tile.apart}
        compile(name, attention_kernels.decode, constants, tile.num_warps, tile.num_stages)
    tile = triton_attention.decode_tiling(AttentionSpec(8, 4, 256, 256, 0.1), torch.bfloat16, torch.bfloat16)
    constants = ATTENTION | least | apart | dict.fromkeys(("D", "V", "DP", "VP"), 256)
    constants |= {"SPLIT": False, "SHARED": False, "M": tile.rows, "N": tile.keys}
    compile("decode-256", attention_kernels.decode, constants, tile.num_warps, tile.num_stages)
    rows = {"HEADS": 32, "V": 128, "VP": 128, "WINDOW": 0} | least
    for name, shared in (("reduce", False), ("reduce-shared", True)):
        most = shared_prefix.MAX_PARTS if shared else triton_attention.MAX_SPLITS
        compile(name, attention_kernels.reduce, rows | {"Z": most, "SHARED": shared})
    tile = triton_attention.prefill_tiling(SPEC, torch.bfloat16)
    constants = ATTENTION | least | {"GP": 4, "C": TILE, "M": tile.rows, "N": tile.keys}
    compile("prefix", shared_prefix.prefix, constants, tile.num_warps, tile.num_stages)
    constants = ATTENTION | {"GP": 4, "M": tile.rows, "N": tile.keys}
    compile("prefill", attention_kernels.prefill, constants, tile.num_warps, tile.num_stages)
    compile(
        "prefill-i8", attention_kernels.prefill, constants | {"SCALED": True}, tile.num_warps, tile.num_stages, "*i8"
    )
    compile_for_hopper("prefill-hopper", 4, 128, False)
    compile_for_hopper("prefill-hopper-64", 7, 64, True)
    for name, shape, rows in (
        ("few-rows", (1024, 4096, False, False), (16, 64, 128, 4, 4, 4, 256)),
        ("few-rows-gate", (4096, 28672, True, False), (16, 64, 128, 1, 4, 4, 128)),
        ("few-rows-add", (3072, 1024, False, True), (64, 32, 64, 8, 4, 4, 256)),
    ):
        constants = few_rows.constants_of(*shape, few_rows.Tiling(*rows))
        compile(name, few_rows_kernels.product, constants, constants["num_warps"], constants["num_stages"])
    for name, gate, cut in (
        ("columns", False, {"TURNED": True, "N": 8, "D": 1024, "S": 2, "B": 1}),
        ("columns-gate", True, {"TURNED": False, "N": 64, "D": 64, "S": 2, "B": 16}),
    ):
        constants = cut | {"DEPTH": 4096, "WIDTH": 4096, "GATE": gate, "ADD": not gate, "NORM": gate, "R": 1}
        compile(name, column_kernels.product, constants, 4)
    strides = {name: STRIDES.get(name, 128) for name in lone_token.decode.arg_names if name.isupper() and "_" in name}
    for name, norm in (("lone", False), ("lone-norm", True)):
        constants = strides | {"G": 4, "D": 128, "P": 16, "N": lone_token.KEYS, "NORM": norm}
        compile(name, lone_token.decode, constants, 1)
    compile("lone-reduce", lone_token.reduce, {"D": 128, "W": lone_token.WIDE, "Z": 64, "N": lone_token.KEYS}, 1)
    compile("derive", derive.derive_kernel, {"L": 4352, "P": 16, "B": derive.TOKENS, "C": derive.SEQS})
    compile("last_rows", derive.last_rows_kernel, {"E": 4096, "B": 1024})
    size = {"V": 151936, "SIZE": 19456, "B": greatest.TILE}
    compile("argmax-part", greatest.part_kernel, size)
    compile("argmax-place", greatest.place_kernel, {"PARTS": 8, "P": 8}, num_warps=1)
    compile("norm", fused.norm_kernel, {"E": 4096, "B": 4096, "ADD": True})
    compile("qk_norm", fused.qk_norm_kernel, {"K": 8, "G": 2, "D": 128, "B": 128, "GP": 4})
    compile("gate", fused.gate_kernel, {"F": 14336, "B": fused.GATE_TILE})
    for name, norm in (("rope_write", False), ("rope_write-norm", True)):
        compile(name, fused.rope_write_kernel, DIMS | {"GP": 8, "HP": 64, "NORM": norm}, 1)


if __name__ == "__main__":
    main()
