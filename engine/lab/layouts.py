"""Cache layouts side by side: what they take, how fast steps are, and how far from exact their logits.

Texts are told, not generated: a prompt is computed as ever, then each further token by a decode step of its own, so
that a layout that drops tokens has dropped them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...models.interface import CacheLayout, row_specs_of
from ...models.keeps import keeps_of
from ...models.layouts import LAYOUTS
from ...models.step import with_rows
from ..batch import row_values
from ..build import Parts, build
from ..config import EngineConfig, engine_config
from ..layout_names import layout_text
from ..memory_plan import memory_plan, spec_bytes
from ..plan import Admission
from .errors import kl_divergence, log_softmax
from .subjects import EngineSubject, make_request

EXACT = "token_major"
NOISE = 1e-7  # nats; what is less is rounding
STEPS = 7  # timed at each context, behind two that are not
NO_STEPS = 2


@dataclass(frozen=True)
class Measured:
    """One layout. `kl` and `flip_rate` are against the exact layout, `perplexity` is its own; all over `num_tokens`."""

    layout: str
    keeps: str
    bytes_a_token: float  # that is kept, in all layers
    bytes_a_token_sent: float  # of a request of max_model_len, those counted that are dropped
    bytes_a_request: int  # beside its tokens
    num_blocks: int  # that fit the memory, of the group that has fewest
    num_requests: float  # of max_model_len that fit it at once
    step_ms: dict[int, float]  # one request, one token, by tokens before it: the least of several
    num_tokens: int
    perplexity: float
    kl: float  # nats a token
    max_kl: float
    flip_rate: float  # part of the tokens of which another is likeliest

    @property
    def exact(self) -> bool:
        """Whether nothing but rounding is between this layout and the exact one."""
        return self.max_kl < NOISE and self.flip_rate == 0


def measure_layouts(
    model: Any = "smollm2",
    layouts: Sequence[str | CacheLayout] = (),
    *,
    text: Sequence[int],
    window: int = 640,
    prompt: int = 512,
    contexts: Sequence[int] = (256, 1024, 4096),
    memory: int = 2**30,
    max_model_len: int = 8192,
    weights: Any = None,
    tell: Callable[[str], None] = lambda what: None,
    **arguments: Any,
) -> list[Measured]:
    """Measures these layouts, all of the table if none, the exact one first.

    `text` are token ids, cut into windows of `window` tokens, the first `prompt` of which are each one's prompt.
    `memory` (bytes) and `max_model_len` are for what fits; `tell` hears what is being measured. Other arguments are the
    engine's. Raises ValueError for a text that has nothing behind a prompt.
    """
    if window <= prompt:
        raise ValueError(f"a window of {window} tokens has nothing behind a prompt of {prompt}: a longer one is right")
    windows = [list(text[i : i + window]) for i in range(0, len(text), window)]
    windows = [w for w in windows if len(w) > prompt]
    if not windows:
        raise ValueError(
            f"the text has {len(text)} tokens, and a prompt takes {prompt}: bring a longer one, or less prompt"
        )
    targets = [token for ids in windows for token in ids[prompt:]]
    longest = max(window, *(c + STEPS + NO_STEPS + 2 for c in contexts))
    sizes = {"max_num_seqs": len(windows), "max_num_batched_tokens": 512, "max_model_len": longest} | arguments
    found, wanted = [], None
    for layout in _with_exact(layouts or tuple(LAYOUTS)):
        name = _name(layout)
        tell(f"{name}: loading")
        config = engine_config(model, layout=layout, **sizes)
        parts = build(replace(config, num_gpu_blocks_override=_enough(config, windows, longest)), weights)
        subject = EngineSubject(name, parts)
        tell(f"{name}: the text")
        rows = forced_logits(subject, windows, prompt)
        wanted = rows if wanted is None else wanted
        tell(f"{name}: steps")
        times = {c: step_seconds(subject, c) * 1e3 for c in contexts}
        measured = {"layout": name, "keeps": kept(parts.layout), "step_ms": times}
        found.append(Measured(**measured | room(parts, memory, max_model_len) | _quality(rows, wanted, targets)))
        # the next one's cache shall not lie beside this one's
        del parts, subject
        gc.collect()
    return found


def _with_exact(layouts: Sequence[str | CacheLayout]) -> list[str | CacheLayout]:
    return [EXACT, *(x for x in layouts if x != EXACT)]


def _name(layout: str | CacheLayout) -> str:
    if isinstance(layout, str):
        # of FILE.py:NAME what is behind the file
        return layout.rpartition(".py:")[2]
    return layout_text(layout) or type(layout).__name__


def _enough(config: EngineConfig, windows: Sequence[Sequence[int]], longest: int) -> int:
    """Blocks in which all windows fit at once, and one request of the longest context."""
    size = config.block_size
    return 2 + max(sum(-(-len(w) // size) + 1 for w in windows), -(-(longest + config.max_num_batched_tokens) // size))


def room(parts: Parts, memory: int, max_model_len: int) -> dict[str, Any]:
    """What `Measured` says of bytes, and of what fits so much memory."""
    config = replace(
        parts.config,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=memory,
        max_model_len=min(max_model_len, parts.model.max_model_len),
    )
    plan = memory_plan(config, parts.model)
    by_row = [row_specs_of(parts.layout, a, 1).values() for a in parts.model.attention]
    return {
        "bytes_a_token": sum(g.block_bytes for g in plan.groups) / config.block_size,
        "bytes_a_token_sent": sum(g.block_bytes * g.blocks_a_request for g in plan.groups) / plan.max_model_len,
        "bytes_a_request": sum(spec_bytes(s, config.dtype, {}) for specs in by_row for s in specs),
        "num_blocks": min(plan.num_blocks),
        "num_requests": plan.full_length_requests,
    }


def kept(layout: CacheLayout) -> str:
    """What a layout keeps of a sequence, in a few words."""
    keeps = keeps_of(layout)
    if keeps.budget is not None:
        of = "" if keeps.rolling else " of the prompt"
        return f"{keeps.budget} tokens{of}"
    if keeps.window is not None:
        return f"first {keeps.sinks}, last {keeps.window}"
    return "all"


def forced_logits(subject: EngineSubject, sequences: Sequence[Sequence[int]], prompt: int) -> list[np.ndarray]:
    """The logits [V] before each told token, sequence by sequence; the first `prompt` tokens of each are its prompt.

    Requests start together, so that every layout has the same rows in the same steps.
    """
    told = [ids[prompt:] for ids in sequences]
    rows = {(i, j): logits_V for i, j, logits_V in subject.forced([ids[:prompt] for ids in sequences], told)}
    return [rows[at] for at in sorted(rows)]


def _quality(rows: Sequence[np.ndarray], wanted: Sequence[np.ndarray], targets: Sequence[int]) -> dict[str, Any]:
    """What `Measured` says of logits, row by row."""
    nll, kl, flips = [], [], 0
    for mine, exact, target in zip(rows, wanted, targets, strict=True):
        nll.append(-log_softmax(mine.astype(np.float64))[target])
        kl.append(kl_divergence(mine[None], exact[None])[0])
        flips += int(mine.argmax() != exact.argmax())
    return {
        "num_tokens": len(kl),
        "perplexity": float(np.exp(np.mean(nll))),
        "kl": float(np.mean(kl)),
        "max_kl": float(np.max(kl)),
        "flip_rate": flips / len(kl),
    }


def step_seconds(subject: EngineSubject, context: int) -> float:
    """The least time of a step that computes one token of one request behind `context` others.

    Those are not computed: the host counts them, and the cache holds zeros.
    """
    runner, scheduler = subject.runner, subject.parts.scheduler
    runner.reset()
    scheduler.abandon()
    ids = [i % subject.parts.model.vocab_size for i in range(context)]
    request = make_request(0, ids, NO_STEPS + STEPS)
    scheduler.add(request)
    admitted: list[Admission] = []
    while not request.output:
        plan = scheduler.schedule()
        assert plan is not None
        runner.prepare(plan)
        scheduler.update(plan, [0] * len(plan.sampled))
        admitted += plan.admitted
    known = replace(admitted[0], tokens=(*ids, 0), num_computed=context)
    at, values = row_values([known], runner.shapes, runner.scratch)
    runner.cache = with_rows(runner.cache, runner.set_rows(runner.cache.rows, at, values))
    seconds = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        start = time.perf_counter()
        tokens = runner.launch(plan).result().token_ids
        seconds.append(time.perf_counter() - start)
        scheduler.update(plan, tokens)
    # whatever else runs on the machine only adds
    return min(seconds[NO_STEPS:])
