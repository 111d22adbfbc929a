"""Where a step's tokens belong, in one launch: what models/step.py derives in some thirty small ones."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .early import early, take_turn
from .sizes import cdiv

Tensor = torch.Tensor

TOKENS, SEQS = 64, 64  # of a tile


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_s"])
def derive_kernel(
    tokens, computed, prompts, rows, starts, table,
    ids_out, positions_out, seqs_out, real_out, blocks_out, offsets_out, lengths_out, prompts_out,
    num_seqs, num_tokens, table_s, L: tl.constexpr, P: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program for B tokens, and for as many sequences."""
    take_turn(EARLY)
    t_B, c_C = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, C)
    ended_B = tl.zeros([B], tl.int32)
    for s0 in range(0, num_seqs, C):
        end_C = tl.load(starts + 1 + s0 + c_C, mask=s0 + c_C < num_seqs, other=2147483647)
        ended_B += tl.sum((t_B[:, None] >= end_C[None, :]).to(tl.int32), 1)
    seq_B, there_B = tl.minimum(ended_B, num_seqs - 1), t_B < num_tokens
    real_B = t_B < tl.load(starts + num_seqs)
    row_B = tl.load(rows + seq_B)
    position_B = tl.where(real_B, tl.load(computed + row_B) + t_B - tl.load(starts + seq_B), 0)
    id_B = tl.load(tokens + row_B.to(tl.int64) * L + position_B, mask=there_B & real_B, other=0)
    at_B = table + seq_B.to(tl.int64) * table_s + position_B // P
    block_B = tl.load(at_B, mask=there_B & real_B, other=0)
    tl.store(ids_out + t_B, id_B, mask=there_B)
    tl.store(positions_out + t_B, position_B, mask=there_B)
    tl.store(seqs_out + t_B, seq_B, mask=there_B)
    tl.store(real_out + t_B, real_B, mask=there_B)
    tl.store(blocks_out + t_B, block_B, mask=there_B)
    tl.store(offsets_out + t_B, position_B % P, mask=there_B)
    mine_B = t_B < num_seqs
    own_B = tl.load(rows + t_B, mask=mine_B, other=0)
    count_B = tl.load(starts + 1 + t_B, mask=mine_B, other=0) - tl.load(starts + t_B, mask=mine_B, other=0)
    tl.store(lengths_out + t_B, tl.load(computed + own_B) + count_B, mask=mine_B)
    tl.store(prompts_out + t_B, tl.load(prompts + own_B), mask=mine_B)


def derive(rows: dict[str, Tensor], inputs: Any, group: int, block_size: int) -> dict[str, Tensor]:
    """As models/step.py's `places`, for inputs on a GPU."""
    table, num_tokens, tokens = inputs.block_tables[group], inputs.num_tokens, rows["tokens"]
    num_seqs, device = len(table), tokens.device
    # each begins at an even address, or kernels that read it would be compiled once more
    of_T = torch.empty((5, num_tokens + -num_tokens % 16), dtype=torch.int32, device=device)[:, :num_tokens]
    of_S = torch.empty((2, num_seqs + -num_seqs % 16), dtype=torch.int32, device=device)[:, :num_seqs]
    real_T = torch.empty(num_tokens, dtype=torch.bool, device=device)
    ids, positions, seqs, blocks, offsets = of_T
    programs = cdiv(max(num_tokens, num_seqs), TOKENS)
    derive_kernel[(programs,)](
        tokens, rows["num_computed"], rows["prompt_len"], inputs.rows_S, inputs.query_starts_S1, table,
        ids, positions, seqs, real_T, blocks, offsets, *of_S,
        num_seqs, num_tokens, table.stride(0), L=tokens.stride(0), P=block_size, B=TOKENS, C=SEQS, num_warps=4,
        **early(device, programs),
    )  # fmt: skip
    return {
        "token_ids_T": ids, "positions_T": positions, "seq_ids_T": seqs, "is_real_T": real_T, "blocks_T": blocks,
        "offsets_T": offsets, "lengths_S": of_S[0], "prompt_lens_S": of_S[1],
    }  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def last_rows_kernel(x, starts, out, num_seqs, num_tokens, x_t, E: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr):
    """The last row of each sequence. Program (row of out, tile of columns); beyond the sequences, the last one's."""
    take_turn(EARLY)
    r, c = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    last = tl.load(starts + 1 + tl.minimum(r, num_seqs - 1)) - 1
    t = tl.minimum(tl.maximum(last, 0), num_tokens - 1).to(tl.int64)
    tl.store(out + r.to(tl.int64) * E + c, tl.load(x + t * x_t + c, mask=c < E), mask=c < E)


def last_rows(x_TE: Tensor, inputs: Any, max_num_seqs: int) -> Tensor:
    """As models/step.py's, on a GPU."""
    num_tokens, size = x_TE.shape
    out, tile = torch.empty((max_num_seqs, size), dtype=x_TE.dtype, device=x_TE.device), 1024
    tiles = cdiv(size, tile)
    last_rows_kernel[(max_num_seqs, tiles)](
        x_TE, inputs.query_starts_S1, out, len(inputs.query_starts_S1) - 1, num_tokens, x_TE.stride(0),
        E=size, B=tile, num_warps=4, **early(x_TE.device, max_num_seqs * tiles),
    )  # fmt: skip
    return out
