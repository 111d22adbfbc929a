"""Hashes on the device: murmur3's finaliser over uint32, bit-equal to the torch room's int32 form."""

from __future__ import annotations

import jax
import jax.numpy as jnp

GOLDEN = 0x9E3779B9


def murmur(h: jax.Array) -> jax.Array:
    """murmur3's 32-bit finaliser (fmix32): h ^= h >> 16; h *= 85EBCA6B; h ^= h >> 13; h *= C2B2AE35; h ^= h >> 16."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    return h ^ (h >> 16)


def gumbel(keys_R2: jax.Array, index_R: jax.Array, size: int, first: jax.Array | int = 0) -> jax.Array:
    """-log(-log1p(-u)) for u = (hash + 0.5) / 2^32, hash folded from request key, output index and token id.

    For the ids first .. first + size - 1.
    """
    key_R2, index_R = keys_R2.astype(jnp.uint32), index_R.astype(jnp.uint32)
    k0_R = murmur(key_R2[:, 0] ^ (index_R * jnp.uint32(GOLDEN)))
    k1_R = murmur(key_R2[:, 1] ^ k0_R)
    token_V = (jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(first)) * jnp.uint32(GOLDEN)
    h_RV = murmur(murmur(token_V[None] ^ k0_R[:, None]) ^ k1_R[:, None])
    u_RV = (h_RV.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    # rounding may reach 1, where the noise would be -inf even for the only token that is left
    return -jnp.log(-jnp.log1p(-jnp.minimum(u_RV, jnp.float32(1 - 2**-24))))


def digest(logits_RV: jax.Array) -> jax.Array:
    """int32: the wrapping sum over v of murmur(bits of logits[v] ^ v * GOLDEN)."""
    bits_RV = jax.lax.bitcast_convert_type(logits_RV.astype(jnp.float32), jnp.uint32)
    place_V = jnp.arange(logits_RV.shape[-1], dtype=jnp.uint32) * jnp.uint32(GOLDEN)
    total_R = jnp.sum(murmur(bits_RV ^ place_V), axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(total_R, jnp.int32)
