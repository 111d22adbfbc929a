"""Counter-based noise and hashes in int32: products wrap and shifts are made logical, so the bits are JAX's uint32."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def gumbel(keys_R2: Tensor, index_R: Tensor, size: int, first: int = 0) -> Tensor:
    """-log(-log1p(-u)), u = (h + 0.5) / 2^32, h the murmur3 finaliser over key, output index and token id.

    For the ids first .. first + size - 1.
    """
    golden = signed(0x9E3779B9)
    k0_R = murmur(keys_R2[:, 0] ^ (index_R * golden))
    k1_R = murmur(keys_R2[:, 1] ^ k0_R)
    ids_V = torch.arange(first, first + size, dtype=torch.int32, device=keys_R2.device) * golden
    h = murmur(murmur(ids_V[None] ^ k0_R[:, None]) ^ k1_R[:, None])
    # the unsigned value, rounded to fp32 once
    u = ((h.to(torch.int64) & 0xFFFFFFFF).to(torch.float32) + 0.5) * 2**-32
    # rounding may reach 1, where the noise would be -inf even for the only token that is left
    return -torch.log(-torch.log1p(-u.clamp_max_(1 - 2**-24)))


def digest(x_RV: Tensor) -> Tensor:
    """int32 [R]: the wrapping sum over v of murmur(fp32 bits of x[v] ^ v * golden)."""
    places_V = torch.arange(x_RV.shape[1], dtype=torch.int32, device=x_RV.device) * signed(0x9E3779B9)
    return murmur(x_RV.float().view(torch.int32) ^ places_V).sum(-1, dtype=torch.int32)


def murmur(h: Tensor) -> Tensor:
    """The finaliser of murmur3 (fmix32)."""
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = (h ^ logical_shift(h, shift)) * signed(factor)
    return h ^ logical_shift(h, 16)


def logical_shift(h: Tensor, n: int) -> Tensor:
    return (h >> n) & ((1 << (32 - n)) - 1)


def signed(x: int) -> int:
    """The int32 of the same bits."""
    return x - 2**32 if x >= 2**31 else x
