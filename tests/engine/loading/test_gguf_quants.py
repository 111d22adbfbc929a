"""Each block format against its formula, written here number by number, and against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from loading_files import TYPES, random_blocks

from octavo.engine.loading.gguf_quants import CHUNK_NUMBERS, QUANTS, dequantise, nbytes_of


def _half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], "<f2")[0])


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _q8_0(b: bytes) -> list[float]:
    return [_half(b, 0) * _signed(b[2 + i]) for i in range(32)]


def _nibble(packed: bytes, i: int) -> int:
    return packed[i] & 15 if i < 16 else packed[i - 16] >> 4


def _q4_0(b: bytes) -> list[float]:
    return [_half(b, 0) * (_nibble(b[2:], i) - 8) for i in range(32)]


def _q4_1(b: bytes) -> list[float]:
    return [_half(b, 0) * _nibble(b[4:], i) + _half(b, 2) for i in range(32)]


def _q5_0(b: bytes) -> list[float]:
    high = int.from_bytes(b[2:6], "little")
    return [_half(b, 0) * ((_nibble(b[6:], i) | (high >> i & 1) << 4) - 16) for i in range(32)]


def _q5_1(b: bytes) -> list[float]:
    high = int.from_bytes(b[4:8], "little")
    return [_half(b, 0) * (_nibble(b[8:], i) | (high >> i & 1) << 4) + _half(b, 2) for i in range(32)]


def _scale_and_minimum(q: bytes, group: int) -> tuple[int, int]:
    """get_scale_min_k4 of ggml-quants.c."""
    if group < 4:
        return q[group] & 63, q[group + 4] & 63
    return q[group + 4] & 15 | q[group - 4] >> 6 << 4, q[group + 4] >> 4 | q[group] >> 6 << 4


def _q4_k(b: bytes, high: bytes | None = None, low: bytes | None = None) -> list[float]:
    low, out = low or b[16:144], []
    for group in range(8):
        scale, minimum = _scale_and_minimum(b[4:16], group)
        for i in range(32):
            byte = low[group // 2 * 32 + i]
            q = byte >> 4 if group % 2 else byte & 15
            q += 16 * (high[i] >> group & 1) if high else 0
            out.append(_half(b, 0) * scale * q - _half(b, 2) * minimum)
    return out


def _q5_k(b: bytes) -> list[float]:
    return _q4_k(b, high=b[16:48], low=b[48:176])


def _q6_k(b: bytes) -> list[float]:
    out = []
    for i in range(256):
        half, group, j = i // 128, i % 128 // 32, i % 32
        byte = b[64 * half + 32 * (group % 2) + j]
        low = byte >> 4 if group >= 2 else byte & 15
        high = b[128 + 32 * half + j] >> 2 * group & 3
        out.append(_half(b, 208) * _signed(b[192 + i // 16]) * ((low | high << 4) - 32))
    return out


def _bf16(b: bytes) -> list[float]:
    return [float(np.frombuffer(b"\0\0" + b, "<f4")[0])]


FORMULAS = {
    "F32": lambda b: [float(np.frombuffer(b, "<f4")[0])],
    "F16": lambda b: [_half(b, 0)],
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def test_every_supported_type_has_a_formula_here():
    assert set(FORMULAS) == set(TYPES)


@pytest.mark.parametrize("kind", FORMULAS)
def test_blocks_are_dequantised_by_their_formula(kind):
    numbers, nbytes = QUANTS[TYPES[kind]].numbers, QUANTS[TYPES[kind]].nbytes
    raw = random_blocks(kind, (3, 5 * numbers), seed=1)
    expected = [FORMULAS[kind](bytes(block)) for block in raw.reshape(-1, nbytes)]
    found = dequantise(raw, TYPES[kind], (3, 5 * numbers))
    assert found.dtype == np.float32
    # two float32 roundings of numbers up to 8: scale times q, minus the minimum
    np.testing.assert_allclose(found, np.array(expected).reshape(3, -1), rtol=3e-7, atol=2e-6)


@pytest.mark.parametrize("kind", [k for k in FORMULAS if k != "F32"])
def test_blocks_are_bit_equal_to_those_of_the_gguf_package(kind):
    # more than one chunk, and the last one not full
    numbers = QUANTS[TYPES[kind]].numbers
    shape = (3, CHUNK_NUMBERS // 2 + 3 * 256) if numbers > 1 else (3, CHUNK_NUMBERS // 2 + 3)
    raw = random_blocks(kind, shape, seed=2)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(TYPES[kind]))
    np.testing.assert_array_equal(dequantise(raw, TYPES[kind], shape), expected)


def test_sizes_are_those_of_the_gguf_package():
    for kind, number in TYPES.items():
        numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert nbytes_of("x", number, (6, 2 * numbers)) == 12 * nbytes


@pytest.mark.parametrize("number, name", [(10, "Q2_K"), (29, "IQ1_M"), (77, "number 77")])
def test_an_unsupported_type_is_named_with_those_supported(number, name):
    with pytest.raises(NotImplementedError, match=f"tensor 'a' has type {name}.*F32, F16, BF16, Q8_0.*Q6_K"):
        nbytes_of("tensor 'a'", number, (4, 256))


def test_rows_that_are_not_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="rows of 48, not a multiple of 32"):
        nbytes_of("tensor 'a'", TYPES["Q8_0"], (2, 48))
