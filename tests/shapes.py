"""Ragged batches that attention has to get right, shared by tests and benchmarks of both kernel rooms."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Ragged:
    """Sequences by tokens already in the cache and tokens of this step, and the heads they are computed with."""

    name: str
    computed: tuple[int, ...]
    counts: tuple[int, ...]
    kv_heads: int = 2
    group_size: int = 3
    k_dim: int = 16
    v_dim: int = 16
    block_size: int = 8
    padding: int = 3  # tokens of the step that belong to nobody
    spare_width: int = 2  # columns of the block table beyond the longest sequence
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None  # None: 1 / sqrt(k_dim)
    # sequences that begin with the same blocks, and how many; None: the step does not say
    shared: tuple[tuple[tuple[int, ...], int], ...] | None = None

    @property
    def decode(self) -> bool:
        return max(self.counts) <= 1

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.computed, self.counts, strict=True))


DECODE = Ragged("decode", (0, 6, 7, 8, 15, 16, 17, 130), (1,) * 8)
PREFILL = Ragged("prefill", (0, 0, 0), (5, 37, 70))
MIXED = Ragged("mixed", (40, 0, 9, 3, 0, 130, 21), (1, 33, 1, 17, 1, 50, 0))

CASES = (
    DECODE,
    replace(DECODE, name="decode-one-row", computed=(300,), counts=(1,), padding=0, spare_width=0),
    replace(DECODE, name="decode-empty-rows", counts=(1, 0, 1, 1, 0, 0, 1, 1)),
    replace(DECODE, name="decode-window", window=9),
    replace(DECODE, name="decode-window-1", window=1),
    replace(DECODE, name="decode-many", computed=tuple(range(3, 260, 2)), counts=(1,) * 129),
    replace(DECODE, name="decode-wide-table", spare_width=70),
    PREFILL,
    replace(PREFILL, name="prefill-one-token", computed=(0,), counts=(1,), padding=15),
    replace(PREFILL, name="prefill-block-edges", computed=(0, 0, 0, 8), counts=(7, 8, 9, 16)),
    replace(PREFILL, name="chunk", computed=(100, 16, 5), counts=(64, 31, 2)),
    replace(PREFILL, name="prefill-window", window=11),
    replace(PREFILL, name="chunk-window-block", computed=(200, 0), counts=(40, 40), window=8),
    replace(PREFILL, name="long", computed=(0,), counts=(600,), block_size=16, padding=40),
    MIXED,
    replace(MIXED, name="mixed-window", window=24),
    replace(MIXED, name="mixed-softcap", softcap=2.0),
    replace(MIXED, name="mixed-sinks", sinks=True),
    replace(MIXED, name="mixed-everything", window=10, softcap=3.0, sinks=True, scale=0.4),
    replace(MIXED, name="mixed-block-1", block_size=1),
    replace(MIXED, name="mixed-block-16", block_size=16),
    replace(MIXED, name="mixed-block-256", block_size=256, spare_width=0),
    replace(MIXED, name="one-head", kv_heads=1, group_size=1),
    replace(MIXED, name="many-groups", kv_heads=3, group_size=7, k_dim=8, v_dim=8),
    replace(MIXED, name="narrow-values", k_dim=24, v_dim=8),
)

ALIKE = Ragged("shared", (16, 40, 17, 23, 130, 24), (1,) * 6, shared=(((0, 2, 1, 4, 5), 2),))
ALL = tuple(range(45))
# steps in which sequences share their first blocks
SHARED = (
    ALIKE,
    replace(ALIKE, name="shared-none", shared=()),
    replace(ALIKE, name="shared-by-one", shared=(((4,), 9),)),
    replace(ALIKE, name="shared-by-all-to-their-end", computed=(48,) * 6, shared=((tuple(range(6)), 6),)),
    replace(ALIKE, name="shared-by-groups", computed=(90, 16, 81, 9, 80, 17), shared=(((4, 0, 2), 10), ((1, 5), 2))),
    replace(ALIKE, name="shared-empty-rows", counts=(1, 1, 0, 1, 1, 0), shared=(((0, 1, 4), 2),)),
    replace(ALIKE, name="shared-softcap-sinks", softcap=2.0, sinks=True, scale=0.4),
    replace(ALIKE, name="shared-many", computed=tuple(50 + i % 9 for i in ALL), counts=(1,) * 45, kv_heads=1,
            shared=((ALL[:35], 6), (ALL[36::2], 4))),
    replace(ALIKE, name="shared-narrow-values", k_dim=24, v_dim=8, block_size=16, shared=(((4, 1), 2),)),
    replace(MIXED, name="shared-mixed", computed=(40, 0, 43, 3, 0, 130, 21), shared=(((0, 2), 5),)),
    replace(MIXED, name="shared-mixed-none", shared=()),
    replace(MIXED, name="shared-mixed-sinks", computed=(40, 0, 43, 3, 90, 130, 89), counts=(1, 33, 1, 17, 1, 50, 1),
            sinks=True, shared=(((0, 2), 5), ((6, 4), 11))),
    replace(ALIKE, name="shared-long", computed=(700, 701, 640, 900), counts=(1,) * 4, group_size=4, kv_heads=1,
            k_dim=64, v_dim=64, block_size=16, shared=(((0, 1), 16), ((2, 3), 40))),
)  # fmt: skip
