"""Lays plans out as padded numpy arrays. The only index building on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models.interface import ModelSpec, Reading, Sampling, SharedPrefixes, StepInput
from ..models.logit_edits import MAX_BAD_IDS, MAX_BAD_WORDS, MAX_BIAS, MAX_PROCESSOR_COLUMNS, MAX_STOP_IDS
from ..models.prompt_embeds import NAME
from ..models.sampling import PARAMS, VARIANTS
from .plan import Admission, Edits, Plan, Transfer
from .shared_prefixes import PrefixFinder, worth_it

if TYPE_CHECKING:
    from .prompt_embeds import PromptEmbeds

# rows of a decode graph: a row too many costs least where there are many
SEQS = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 4096, 64))
# tokens of a busy engine's mixed step: at least, as each costs something beside its tokens; and where sizes lie close,
# multiples, of which products leave no tile and few processors empty
FULL, EVEN = 1024, 512
STEP, LARGE = 128, 64  # tokens between the sizes of a mixed step, as a graph and beyond
READ_TILE = 64  # hidden rows whose logprobs are read at a time
MAX_TOKEN_IDS = 128  # ids a request can ask the logprobs of by name


NO_EMBEDS: Mapping[str, PromptEmbeds] = {}
PLAIN = VARIANTS[:3]  # what most requests ask for


@dataclass(frozen=True)
class Shapes:
    """The chains of padded sizes: every program the engine may run. Each ends with the largest size there is."""

    seqs: tuple[int, ...]  # of a decode step, where tokens = sequences
    tokens: tuple[int, ...]  # of a mixed step, where sequences = max_num_seqs
    widths: tuple[int, ...]  # of block tables, in blocks
    sampled: tuple[int, ...]  # rows of the head
    admitted: tuple[int, ...]  # rows of set_rows
    known: tuple[int, ...]  # tokens a row of set_rows brings
    moved: tuple[int, ...]  # blocks of move_blocks
    logprobs: tuple[int, ...]  # -1 none, 0 the sampled one, then how many of the top
    token_ids: tuple[int, ...]  # ids a row whose logprobs are asked for by name
    read: tuple[int]  # hidden rows that are read at a time: one size, so that memory is bounded
    seldom: tuple[int, ...] = ()  # rows of the heads that few ask for; empty: as `sampled`
    shared: tuple[int, ...] = ()  # of a decode step whose sequences share prefixes; empty: nobody looks
    shared_tokens: tuple[int, ...] = ()  # of a mixed one
    joined: tuple[int, ...] = ()  # of a decode step that is one program with its head
    full: tuple[int, ...] = ()  # of a mixed step: what the scheduler cuts it down to, so that nothing of it is padding

    def heads(self, variant: str, num_logprobs: int) -> tuple[int, ...]:
        """Rows of the heads of that kind."""
        return self.sampled if not self.seldom or (num_logprobs < 0 and variant in PLAIN) else self.seldom

    @staticmethod
    def chain(
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        *,
        max_logprobs: int = 20,
        exact: bool = False,
        graph_tokens: int | None = None,
        any_width: bool = False,
        shared_prefixes: bool = False,
        joined_seqs: int = 0,
    ) -> Shapes:
        """`exact` is for backends that compile nothing: sizes then follow the work closely. `graph_tokens` is for those
        that record graphs, which cost less than a compiled program: more sizes, and beyond so many tokens nearly exact
        ones, which are not recorded. `any_width`: a wider block table costs only its transfer, and leaves room for more
        sizes. `shared_prefixes`: attention may be told of them. `joined_seqs`: decode steps of so many sequences are
        joined with their head.
        """
        blocks = -(-max_model_len // block_size)
        seqs, tokens, sampled = step_sizes(max_num_seqs, budget, exact, graph_tokens, any_width)
        shared = shared_tokens = ()
        if shared_prefixes and max_num_seqs > 1:
            shared, shared_tokens = (seqs, tokens) if exact else shared_sizes(max_num_seqs, budget, graph_tokens)
        return Shapes(
            seqs=seqs,
            tokens=tokens,
            widths=powers(8, blocks, 512) if any_width else powers(2 if exact else 4, blocks, 8),
            sampled=sampled,
            admitted=tuple(sorted({1, min(8, max_num_seqs), max_num_seqs})),
            known=powers(8, max_model_len, 256),
            moved=tuple(sorted({1, min(8, max_num_seqs), max_num_seqs})),
            logprobs=tuple(sorted({-1, 0, min(max_logprobs, vocab_size), vocab_size})),
            seldom=() if exact else seldom_sizes(sampled, max_num_seqs, graph_tokens),
            token_ids=powers(4, MAX_TOKEN_IDS, 8),
            read=(min(READ_TILE, budget),),
            shared=shared,
            shared_tokens=shared_tokens,
            joined=tuple(n for n in seqs if n <= joined_seqs),
            full=() if exact else full_sizes(tokens, budget, graph_tokens),
        )


def step_sizes(
    max_num_seqs: int, budget: int, exact: bool, graph_tokens: int | None, any_width: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sequences of a decode step, tokens of a mixed one, rows of a head; arguments as of Shapes.chain."""
    if exact:
        each = tuple(range(1, max_num_seqs + 1))
        return each, (*range(8, budget, 8), budget), each
    if graph_tokens is not None:
        seqs = tuple(n for n in SEQS if n < max_num_seqs) + (max_num_seqs,)
        middle = min(graph_tokens, 16 * STEP)
        small = (*powers(2, STEP, 16), *range(2 * STEP, middle, STEP), *range(middle, graph_tokens + 1, 4 * STEP))
        tokens = (*small, *range(graph_tokens + LARGE, budget, LARGE))
        return seqs, (*(n for n in tokens if n < budget), budget), powers(2, max_num_seqs)
    if not any_width:
        return powers(2, max_num_seqs), powers(4, budget, 32), powers(4, max_num_seqs)
    # of one row XLA makes no product, and up to eight it pads for cuBLAS: a dozen kernels more a layer
    few = tuple(n for n in (2, 8) if n < max_num_seqs)
    # at 128 rows cuBLAS takes tiles that are slower than those for 160
    seqs = tuple(n for n in (*few, 32, 64, 96, 160) if n < max_num_seqs) + powers(2, max_num_seqs, 256)
    return seqs, steps(budget, 128), few[1:] + powers(4, max_num_seqs, 16)


def seldom_sizes(sampled: tuple[int, ...], max_num_seqs: int, graph_tokens: int | None) -> tuple[int, ...]:
    """Rows of the heads that few ask for: some of `sampled`."""
    if graph_tokens is None:
        return tuple(sorted({*sampled[2::2], sampled[-1]}))
    # a recording costs more than it saves where a row too many waits for the same launches
    return tuple(n for n in sampled if n == 4 or n >= 16 or n == max_num_seqs)


def full_sizes(tokens: tuple[int, ...], budget: int, graph_tokens: int | None) -> tuple[int, ...]:
    """Those of `tokens` that a mixed step is cut down to."""
    # among few sizes those between powers of two cost most a token, and to leave more to the next step is cheaper
    even = [n for n in tokens[:-1] if not (n & (n - 1) if graph_tokens is None else n % EVEN)]
    return tuple(n for n in (*even, budget) if n >= FULL)


def shared_sizes(max_num_seqs: int, budget: int, graph_tokens: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sequences of a decode step that shares prefixes, tokens of a mixed one.

    Few: a row too many often costs less than reading prefixes again, and `worth_it` says whether.
    """
    recorded = graph_tokens is not None
    few = (*powers(2, max_num_seqs, 16), 48, 96, 192) if recorded else powers(4, max_num_seqs, 64)
    most, least = min(budget, graph_tokens or budget), 512 if recorded else 1024
    return tuple(sorted({n for n in few if n <= max_num_seqs})), powers(2 if recorded else 8, most, least)


def powers(factor: int, largest: int, smallest: int = 1) -> tuple[int, ...]:
    """smallest, smallest * factor, ... below largest, then largest itself."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor
    return (*sizes, largest)


def steps(largest: int, smallest: int) -> tuple[int, ...]:
    """Powers of two up to 512 and, beyond, also the middles between them; then largest itself.

    So no more than a third of a large step is padding.
    """
    sizes, n = [], smallest
    while n < largest:
        sizes.append(n)
        n += n if n < 512 else (1 << n.bit_length() - 1) // 2
    return (*sizes, largest)


def at_least(sizes: tuple[int, ...], n: int) -> int:
    """The smallest size of the chain that n fits in."""
    return next(s for s in sizes if s >= n)


def padded(values: Sequence[int], size: int, fill: int) -> np.ndarray:
    """values as int32 [size], the rest filled."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def pack_bits(allowed: np.ndarray) -> np.ndarray:
    """bool [..., V] as int32 [..., ceil(V / 32)]: id i is bit i % 32 of word i // 32. Bits beyond V are set."""
    spare = [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)]
    whole = np.pad(allowed, spare, constant_values=True)
    return np.packbits(whole, axis=-1, bitorder="little").view("<i4").astype(np.int32, copy=False)


def all_allowed(num_rows: int, vocab_size: int) -> np.ndarray:
    """A mask as pack_bits makes it, in which every token is allowed."""
    return np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)


def allow(mask_W: np.ndarray, ids: Sequence[int], where: int) -> None:
    """Allows these ids in one row of a mask if it allows the id `where`."""
    bits = mask_W.view(np.uint8)
    if bits[where // 8] >> where % 8 & 1:
        for i in ids:
            bits[i // 8] |= 1 << i % 8


def step_input(
    plan: Plan,
    tables: Sequence[np.ndarray],
    shapes: Shapes,
    block_size: int,
    embeds: Mapping[str, PromptEmbeds] = NO_EMBEDS,
    prefixes: PrefixFinder | None = None,
    taps: tuple[str, ...] = (),
) -> StepInput:
    """The ragged step. `tables` are the host's block tables, [max_num_seqs + 1, B] a cache group.

    `prefixes` finds those that sequences share. `taps` are kept beside those of the plan.
    `embeds` has the embeddings that requests brought, by id; they come along where a chunk needs some.

    Fresh arrays each time: JAX on a CPU may alias them until the step has run.
    """
    scratch, counts, chunk_rows = len(tables[0]) - 1, [c.num_tokens for c in plan.chunks], [c.row for c in plan.chunks]
    # all hidden rows come out of mixed steps only, and cuts are made there: less of each size of a decode step
    given = embeds and [c for c in plan.chunks if c.request_id in embeds and c.start < len(embeds[c.request_id].rows)]
    decode = max(counts) == 1 and not plan.reads and not given and not plan.cuts
    seqs = at_least(shapes.seqs, len(counts)) if decode else scratch
    tokens = seqs if decode else at_least(shapes.tokens, sum(counts))
    shared: tuple[SharedPrefixes | None, ...] = ()
    if prefixes and not given:
        single = np.array(chunk_rows if decode else [c.row if c.num_tokens == 1 else -1 for c in plan.chunks], np.int32)
        saved = prefixes.find(plan.chunks, single, tables)
        wide = next((n for n in (shapes.shared if decode else shapes.shared_tokens) if n >= sum(counts)), None)
        if wide is not None and worth_it(saved, wide - tokens):
            tokens, seqs = wide, wide if decode else seqs
            shared = prefixes.lay_out(seqs)
    longest = max(c.start + c.num_tokens for c in plan.chunks)
    width = at_least(shapes.widths, -(-longest // block_size))
    rows = padded(chunk_rows, seqs, scratch)
    starts = np.zeros(seqs + 1, np.int32)
    np.cumsum(padded(counts, seqs, 0), out=starts[1:])
    extra = {NAME: _given_rows(plan, starts, tokens, embeds)} if given else {}
    tables = tuple(t[rows, :width] for t in tables)
    return StepInput(rows, starts, tables, tokens, decode, extra, plan.taps + taps, shared)


def with_extra(inputs: StepInput, model: ModelSpec) -> list[StepInput]:
    """The same step without and, where the model takes some, with embeddings that requests bring."""
    if NAME not in model.extra:
        return [inputs]
    rows = np.zeros((inputs.num_tokens, *model.extra[NAME].shape), np.float32)
    return [inputs, replace(inputs, extra={NAME: rows})]


def _given_rows(plan: Plan, starts: np.ndarray, num_tokens: int, embeds: Mapping[str, PromptEmbeds]) -> np.ndarray:
    """Each chunk's part of the embeddings that its request brought, float32 [num_tokens, E]; zeros elsewhere."""
    size = next(iter(embeds.values())).rows.shape[1]
    out = np.zeros((num_tokens, size), np.float32)
    for c, at in zip(plan.chunks, starts):
        if c.request_id in embeds:
            part = embeds[c.request_id].rows[c.start : c.start + c.num_tokens]
            out[at : at + len(part)] = part
    return out


def read_places(plan: Plan) -> list[slice]:
    """Where each of a plan's reads lies among the tokens of its step."""
    starts = [0, *accumulate(c.num_tokens for c in plan.chunks)]
    first = [starts[r.chunk] - plan.chunks[r.chunk].start for r in plan.reads]
    return [slice(at + r.start, at + r.stop) for at, r in zip(first, plan.reads, strict=True)]


def reading_inputs(plan: Plan, shapes: Shapes, mode: str, num_tokens: int) -> list[Reading]:
    """Tiles of all hidden rows of a step, of which there are num_tokens, behind which logprobs are read."""
    reads = [(read, at) for read, at in zip(plan.reads, read_places(plan), strict=True) if read.targets]
    places = [i for _, at in reads for i in range(at.start, at.stop)]
    targets = [i for read, _ in reads for i in read.targets]
    ids = [i for read, _ in reads for i in read.token_ids or ((),) * len(read.targets)]
    (size,) = shapes.read
    num = at_least(shapes.logprobs, max((read.num_logprobs for read, _ in reads), default=0))
    tiles = []
    for start in range(0, len(places), size):
        own = slice(start, start + size)
        given = token_ids_input(ids[own] if any(ids) else (), size, shapes)
        at, ids_behind = padded(places[own], size, 0), padded(targets[own], size, 0)
        tiles.append(Reading(at, ids_behind, num_tokens, num, mode, given))
    return tiles


def token_ids_input(ids: Sequence[Sequence[int]], size: int, shapes: Shapes) -> np.ndarray | None:
    """Ids of the first rows as int32 [size, N]; None if there are none at all."""
    longest = max(map(len, ids), default=0)
    if not longest:
        return None
    out = np.zeros((size, at_least(shapes.token_ids, longest)), np.int32)
    for row, given in zip(out, ids):
        row[: len(given)] = given
    return out


def split_reads(plan: Plan, tiles: Sequence[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """What the tiles of reading_inputs brought, joined, for each of a plan's reads; nothing for one without targets."""
    whole = {name: np.concatenate([tile[name] for tile in tiles]) for name in (tiles[0] if tiles else ())}
    ends = [0, *accumulate(len(read.targets) for read in plan.reads)]
    each = pairwise(ends)
    return [{name: x[start:end] for name, x in whole.items()} if end > start else {} for start, end in each]


def sampling_input(
    plan: Plan,
    shapes: Shapes,
    scratch: int,
    digest: bool,
    mask: np.ndarray | None = None,
    logprobs_mode: str = "raw_logprobs",
) -> Sampling:
    """Which hidden rows the head samples. `mask` has one row a sampled chunk, as pack_bits makes it."""
    at = [i for i, c in enumerate(plan.chunks) if c.samples]
    size = at_least(shapes.heads(plan.variant, plan.num_logprobs), len(at))
    if mask is not None:
        # padding allows everything
        mask = np.concatenate([mask, np.full((size - len(at), mask.shape[1]), -1, np.int32)])
    return Sampling(
        padded(at, size, 0),
        padded([plan.chunks[i].row for i in at], size, scratch),
        plan.variant,
        at_least(shapes.logprobs, plan.num_logprobs),
        digest,
        mask,
        logprobs_mode,
        token_ids_input(plan.token_ids, size, shapes),
    )


def row_values(admitted: Sequence[Admission], shapes: Shapes, scratch: int) -> tuple[np.ndarray, dict[str, Any]]:
    """What set_rows writes: the rows, and a value for each of sampling.row_specs but those of edit_specs."""
    size = at_least(shapes.admitted, len(admitted))
    known = at_least(shapes.known, max(len(a.tokens) for a in admitted))
    values = {
        "tokens": np.zeros((size, known), np.int32),
        "num_computed": padded([a.num_computed for a in admitted], size, 0),
        "prompt_len": padded([a.prompt_len for a in admitted], size, 0),
        "keys": np.zeros((size, 2), np.int32),
        "params": np.zeros((size, len(PARAMS)), np.float32),
        "min_tokens": padded([a.min_tokens for a in admitted], size, 0),
        "stop_ids": np.zeros((size, MAX_STOP_IDS), np.int32),
        "edited": padded([a.edits is not None for a in admitted], size, 0),
    }
    for i, a in enumerate(admitted):
        values["tokens"][i, : len(a.tokens)] = a.tokens
        values["keys"][i], values["params"][i] = a.key, a.params
        if a.stop_ids:
            values["stop_ids"][i] = a.stop_ids[0]
            values["stop_ids"][i, : len(a.stop_ids)] = a.stop_ids
    return padded([a.row for a in admitted], size, scratch), values


def edit_values(
    admitted: Sequence[Admission], shapes: Shapes, scratch: int, vocab_size: int
) -> tuple[np.ndarray, dict[str, Any]]:
    """What set_rows writes for those that have edits: the rows, and a value for each of edit_specs."""
    size, edits = at_least(shapes.admitted, len(admitted)), [a.edits or Edits() for a in admitted]
    return padded([a.row for a in admitted], size, scratch), edit_columns(edits, size, vocab_size)


def edit_columns(edits: Sequence[Edits], size: int, vocab_size: int) -> dict[str, np.ndarray]:
    """The columns of edit_specs, for `size` rows of which the first have these edits."""
    values = {
        "allowed": np.full((size, -(-vocab_size // 32)), -1, np.int32),
        "bias_ids": np.full((size, MAX_BIAS), -1, np.int32),
        "bias": np.zeros((size, MAX_BIAS), np.float32),
        "bad_ids": np.zeros((size, MAX_BAD_IDS), np.int32),
        "bad_back": np.zeros((size, MAX_BAD_IDS), np.int32),
        "bad_words": np.full((size, MAX_BAD_IDS), -1, np.int32),
        "bad_last": np.full((size, 2 * MAX_BAD_WORDS), -1, np.int32),
        "processors": np.zeros((size, MAX_PROCESSOR_COLUMNS), np.float32),
    }
    for i, e in enumerate(edits):
        if e.allowed:
            allowed = np.zeros(vocab_size, bool)
            allowed[list(e.allowed)] = True
            values["allowed"][i] = pack_bits(allowed)
        for n, (token, value) in enumerate(e.bias):
            values["bias_ids"][i, n], values["bias"][i, n] = token, value
        end = 0
        for n, word in enumerate(e.bad_words):
            start, end = end, end + len(word)
            values["bad_ids"][i, start:end] = word
            values["bad_back"][i, start:end] = range(len(word) - 1, -1, -1)
            values["bad_words"][i, start:end], values["bad_last"][i, n] = n, word[-1]
        for column, value in e.processors:
            values["processors"][i, column] = value
    return values


def token_input(
    sampled: Sequence[tuple[int, int, int]], shapes: Shapes, scratch: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, positions and ids of Plan.tokens; padding names the scratch row."""
    size = at_least(shapes.admitted, len(sampled))
    rows, positions, ids = ([s[i] for s in sampled] for i in range(3))
    return padded(rows, size, scratch), padded(positions, size, 0), padded(ids, size, 0)


def move_input(
    transfers: Sequence[Transfer], num_groups: int, shapes: Shapes
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Source and target blocks, one array a cache group; padding copies the null block onto itself."""
    pairs = [[(t.source, t.target) for t in transfers if t.group == g] for g in range(num_groups)]
    size = at_least(shapes.moved, max(map(len, pairs)))
    source, target = (tuple(padded([p[i] for p in ps], size, 0) for ps in pairs) for i in (0, 1))
    return source, target
