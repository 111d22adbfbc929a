"""What H2O and SnapKV share: tokens of a budget, ranked by the attention they got, each kv head for itself.

Slots (M) are not positions: "position" says whose key a head has in a slot, and "weight" how much attention it got.
The rest follows from lengths alone (models/keeps.py), so that the host can count. An attention step in the space of
slots is one over a shorter sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from ..interface import Array, ArraySpec, AttentionSpec, LayerCache, Step
from ..keeps import Keeps
from .gathered import attend, gather, positions
from .paged import TokenMajor, turned

STAYS = 1e30  # a rank above all weights


class Slots(NamedTuple):
    """A step as slots see it. `full_S`: the one new token takes a place that is taken."""

    held_S: Array  # before the step
    used_S: Array  # with the new tokens
    full_S: Array
    table_SB: Array


@dataclass(frozen=True)
class Evicting(TokenMajor):
    """Keys and values of `budget` tokens, among them the last `recent`. A kind says which queries count, and the rank.

    Keys keep their true positions. Layers with a window of their own keep that, and all in it.
    """

    budget: int = 256
    recent: int = 32
    gathers: ClassVar[bool] = True

    @property
    def keeps(self) -> Keeps:
        raise NotImplementedError

    def counts(self, step: Step) -> Array:
        """Whether the attention that a query pays counts, [T]."""
        raise NotImplementedError

    def rank(self, ops: Any, weight_SKM: Array) -> Array:
        """What is greatest stays, of the weights that slots have got; those of the last `recent` tokens are 0."""
        return weight_SKM

    def spec(self, attention: AttentionSpec, num_blocks: int) -> dict[str, ArraySpec]:
        """k and v, and of each head and slot the position and the weight."""
        arrays = super().spec(attention, num_blocks)
        if attention.window is not None:
            return arrays
        shape, axes = arrays["k"].shape[:-1], arrays["k"].axes[:-1]
        book = {"position": "int32", "weight": "float32"}
        return arrays | {name: ArraySpec(shape, axes, dtype, "zeros") for name, dtype in book.items()}

    def attention(
        self, ops: Any, cache: LayerCache, parts: dict[str, Array], step: Step, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        """Writes each token in a free slot, or over the lightest; attends; adds up weights; cuts where one is due."""
        if spec.window is not None:
            return super().attention(ops, cache, parts, step, spec)
        xp, size, slots, (q, k) = ops.xp, self.block_size, self._slots(ops, step), turned(ops, parts, step, spec)
        weight_SMK = gather(cache["weight"], slots.table_SB)
        slot_TK, stale_SMK = self._places(ops, cache, step, slots, weight_SMK)
        at = self._blocks(ops, step, slots, slot_TK)
        new = {"k": k, "v": parts["v"], "position": step.positions_T[:, None] + 0 * slot_TK}
        cache = cache | {name: ops.scatter(cache[name], at, x) for name, x in new.items()}

        def read(table_WB: Array) -> tuple[Array, Array, Array]:
            return gather(cache["k"], table_WB), gather(cache["v"], table_WB), positions(ops, table_WB, size)

        place_T = self._place(ops, step, slots)
        short = replace(step, block_tables_SB=slots.table_SB, lengths_S=slots.used_S, positions_T=place_T)
        count_T = xp.astype(self.counts(step) & step.is_real_T, xp.float32)
        out, mass_SMK = attend(ops, q, read, short, spec, size, sinks_KG=parts.get("sinks"), count_T=count_T)
        weight_SMK = xp.where(stale_SMK, 0.0, weight_SMK) + mass_SMK
        blocks_SBPK = weight_SMK.reshape(*slots.table_SB.shape, size, -1)
        cache = cache | {"weight": ops.scatter(cache["weight"], (slots.table_SB,), blocks_SBPK)}
        # a cut is never in a decode step
        return out, cache if step.decode else self._cut(ops, cache, step, slots, weight_SMK)

    def _place(self, ops: Any, step: Step, slots: Slots) -> Array:
        """Each token's place among the slots, [T]: behind those that are held; in a full cache the last, to see all."""
        seq_T = step.seq_ids_T
        behind_T = slots.held_S[seq_T] + step.positions_T - self._done(step)[seq_T]
        return ops.xp.where(slots.full_S[seq_T], self.budget - 1, behind_T)

    def _places(self, ops: Any, cache: LayerCache, step: Step, slots: Slots, weight_SMK: Array) -> tuple[Array, Array]:
        """The slot of each token and head [T, K], and whether a slot's weight so far is another's [S, M, K]."""
        xp, seq_T, slot_M = ops.xp, step.seq_ids_T, self._slot_numbers(ops, slots)
        stale_SMK = (slot_M >= slots.held_S[:, None])[..., None]
        slot_TK = self._place(ops, step, slots)[:, None] + 0 * ops.arange(weight_SMK.shape[-1], like=seq_T)
        if not self.keeps.rolling:
            return slot_TK, stale_SMK
        lightest_SK = self._lightest(ops, cache, step, slots, weight_SMK)
        taken_SMK = slots.full_S[:, None, None] & (slot_M[..., None] == lightest_SK[:, None])
        return xp.where(slots.full_S[seq_T][:, None], lightest_SK[seq_T], slot_TK), stale_SMK | taken_SMK

    def _blocks(self, ops: Any, step: Step, slots: Slots, slot_TK: Array) -> tuple[Array, Array, Array]:
        """Where these slots are: block, offset and head. Padding's are in the null block."""
        xp, real_T1 = ops.xp, step.is_real_T[:, None]
        slot_TK = xp.where(real_T1, slot_TK, 0)
        block_TK = xp.where(real_T1, slots.table_SB[step.seq_ids_T[:, None], slot_TK // self.block_size], 0)
        return block_TK, slot_TK % self.block_size, ops.arange(slot_TK.shape[1], like=step.seq_ids_T)[None]

    def _done(self, step: Step) -> Array:
        """Tokens computed before the step, [S]."""
        return step.lengths_S - step.query_starts_S1[1:] + step.query_starts_S1[:-1]

    def _slots(self, ops: Any, step: Step) -> Slots:
        xp, keeps, done_S = ops.xp, self.keeps, self._done(step)
        held_S = left(xp, keeps, done_S, step.prompt_lens_S)
        full_S = (done_S >= step.prompt_lens_S) & (held_S >= self.budget) & keeps.rolling
        used_S = xp.where(full_S, self.budget, held_S + step.lengths_S - done_S)
        # in sections no more than the budget is ever held, however long the table is
        most = None if keeps.section is None else -(-self.budget // self.block_size)
        return Slots(held_S, used_S, full_S, step.block_tables_SB[:, :most])

    def _slot_numbers(self, ops: Any, slots: Slots) -> Array:
        return ops.arange(slots.table_SB.shape[1] * self.block_size, like=slots.table_SB)[None]

    def _lightest(self, ops: Any, cache: LayerCache, step: Step, slots: Slots, weight_SMK: Array) -> Array:
        """The slot, of each head, of least weight among those that are not of the last `recent` tokens: [S, K]."""
        xp, done_S = ops.xp, self._done(step)
        position_SMK = gather(cache["position"], slots.table_SB)
        held_SM = self._slot_numbers(ops, slots) < slots.held_S[:, None]
        may_go = held_SM[..., None] & (position_SMK <= (done_S - self.recent)[:, None, None])
        return ops.argmax(xp.where(may_go, -weight_SMK, -STAYS).swapaxes(1, 2))

    def _cut(self, ops: Any, cache: LayerCache, step: Step, slots: Slots, weight_SMK: Array) -> LayerCache:
        """Moves what stays into the first slots, the greatest rank in front, where a section or the prompt ends."""
        xp, size, keeps, length_S = ops.xp, self.block_size, self.keeps, step.lengths_S
        cut_S = length_S == step.prompt_lens_S
        if keeps.section is not None:
            cut_S = cut_S | ((length_S < step.prompt_lens_S) & (length_S % keeps.section == 0))
        cut_S = cut_S & (left(xp, keeps, length_S, step.prompt_lens_S) < slots.used_S)
        position_SKM = gather(cache["position"], slots.table_SB).swapaxes(1, 2)
        used_S1M = (self._slot_numbers(ops, slots) < slots.used_S[:, None])[:, None]
        late_SKM = position_SKM >= (length_S - self.recent)[:, None, None]
        weight_SKM = xp.where(used_S1M & ~late_SKM, weight_SMK.swapaxes(1, 2), 0.0)
        rank_SKM = xp.where(late_SKM, STAYS, self.rank(ops, weight_SKM))
        many = min(self.budget, rank_SKM.shape[-1])
        _, from_SKC = ops.top_k(xp.where(used_S1M, rank_SKM, -STAYS), many)
        to_C = ops.arange(many, like=slots.table_SB)
        seq_S11 = ops.arange(slots.table_SB.shape[0], like=to_C)[:, None, None]
        head_1K1 = ops.arange(from_SKC.shape[1], like=to_C)[None, :, None]
        source = (slots.table_SB[seq_S11, from_SKC // size], from_SKC % size, head_1K1)
        target_SKC = xp.where(cut_S[:, None, None], slots.table_SB[seq_S11, (to_C + 0 * from_SKC) // size], 0)
        target = (target_SKC, (to_C % size)[None, None], head_1K1)
        return {name: ops.scatter(x, target, x[source]) for name, x in cache.items()}


def left(xp: Any, keeps: Keeps, done_S: Array, prompt_S: Array) -> Array:
    """Keeps.left for each sequence."""
    reading, read = done_S < prompt_S, xp.minimum(done_S, prompt_S)
    held, budget = read, keeps.budget or 0
    if keeps.section is not None:
        start = xp.where(reading, read, prompt_S - 1) // keeps.section * keeps.section
        held = xp.minimum(start, budget - keeps.section) + read - start
    behind = xp.minimum(held, budget) + done_S - read
    return xp.where(reading, held, xp.minimum(behind, budget) if keeps.rolling else behind)
