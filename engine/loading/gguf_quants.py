"""Dequantises the block formats of ggml (ggml-common.h, ggml-quants.c in llama.cpp) to float32, with numpy.

Formulas are those of the reference dequantize_row_* functions, operation by operation in float32, so that results are
bit-equal to them. Blocks are rows of bytes; a block's numbers are 32 or 256 neighbours of the fastest axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .pages import empty

TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# blocks of one pass: temporaries stay in the processor's cache, and the peak of memory near the result's size
CHUNK_NUMBERS = 1 << 17


@dataclass(frozen=True)
class Quant:
    """A block format: how many bytes hold how many numbers, and how to get them out."""

    nbytes: int
    numbers: int
    dequantise: Callable[[np.ndarray], np.ndarray]  # uint8 [n, nbytes] -> float32 [n, numbers]


def nbytes_of(what: str, type_id: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in the file. Raises NotImplementedError, naming it, if its type cannot be dequantised."""
    quant = QUANTS.get(type_id)
    if quant is None:
        supported = ", ".join(TYPE_NAMES[i] for i in QUANTS)
        name = TYPE_NAMES.get(type_id, f"number {type_id}")
        raise NotImplementedError(f"{what} has type {name}, which is not supported: {supported} are")
    if shape[-1] % quant.numbers:
        raise ValueError(f"{what} has rows of {shape[-1]}, not a multiple of {quant.numbers}: the file is corrupt")
    count = 1
    for size in shape:
        count *= size
    return count // quant.numbers * quant.nbytes


def dequantise(raw: np.ndarray, type_id: int, shape: tuple[int, ...]) -> np.ndarray:
    """A fresh float32 array of `shape` from the bytes of its blocks (uint8, any shape, C order)."""
    quant = QUANTS[type_id]
    blocks = raw.reshape(-1, quant.nbytes)
    out = empty((len(blocks), quant.numbers), np.float32)
    step = CHUNK_NUMBERS // quant.numbers
    for at in range(0, len(blocks), step):
        out[at : at + step] = quant.dequantise(blocks[at : at + step])
    return out.reshape(shape)


def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    """The half-precision number in bytes at, at + 1 of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, groups, b] -> [n, groups, 2 b]: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 4] -> [n, 32]: bit i of the little-endian word."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def _f32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<f4")


def _half(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _f16(blocks, 0) * (_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8))


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    out = _f16(blocks, 0) * _nibbles(blocks[:, 4:])
    out += _f16(blocks, 2)
    return out


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    quants = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _f16(blocks, 0) * (quants.view(np.int8) - np.int8(16))


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    out = _f16(blocks, 0) * (_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4)
    out += _f16(blocks, 2)
    return out


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima of six bits each, out of 12 bytes: uint8 [n, 12] -> two of [n, 8]."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
    return scales, minima


def _k_affine(blocks: np.ndarray, quants: np.ndarray) -> np.ndarray:
    """d * scale * q - dmin * minimum over eight groups of 32; quants uint8 [n, 8, 32]."""
    scales, minima = _k_scales(blocks[:, 4:16])
    out = (_f16(blocks, 0) * scales)[..., None] * quants
    out -= (_f16(blocks, 2) * minima)[..., None]
    return out.reshape(len(blocks), 256)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _k_affine(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # bit g of byte j is the fifth bit of number j in group g
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _k_affine(blocks, low | fifth << 4)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    # of each byte of qh, bits 2g, 2g + 1 are the upper bits of group g
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    quants = ((low | upper << 4).view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    scales = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (scales[..., None] * quants).reshape(len(blocks), 256)


QUANTS = {
    0: Quant(4, 1, _f32),
    1: Quant(2, 1, _half),
    30: Quant(2, 1, _bf16),
    8: Quant(34, 32, _q8_0),
    2: Quant(18, 32, _q4_0),
    3: Quant(20, 32, _q4_1),
    6: Quant(22, 32, _q5_0),
    7: Quant(24, 32, _q5_1),
    12: Quant(144, 256, _q4_k),
    13: Quant(176, 256, _q5_k),
    14: Quant(210, 256, _q6_k),
}
