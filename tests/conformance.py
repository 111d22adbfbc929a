"""The conformance table: what each field of SamplingParams is asked, and what must come of it. Data, and an oracle.

`make conformance` writes docs/conformance.md; tests/engine/test_conformance.py fills every cell and holds the page
equal. A field of SamplingParams without a row here fails there.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import sampling_oracle as oracle
from oracle import logits
from tiny import TINY, VOCAB, numpy_weights, spec_of

from octavo.engine import LogitsProcessor, RequestOutputKind, SamplingParams

CONDITIONS = ("alone", "mixed batch", "overlapped", "n = 3", "after preemption", "after a prefix hit")
SPECIAL, EOS, ADDED = 3, 9, 5  # of the tokenizer; the last is added without being special
BASE: dict[str, Any] = {"temperature": 0.9, "seed": 40, "max_tokens": 9}


@dataclass(frozen=True)
class Case:
    """One row. `asks` (of the base's tokens) is what the field says; `beside` is said with and without it."""

    name: str
    rule: str  # what it must do, for the page
    asks: Callable[[list[int]], dict[str, Any]]
    beside: dict[str, Any] = field(default_factory=dict)
    changes: str = "tokens"  # what must differ from the base: tokens, text, or what `check` alone looks at
    refused: bool = False


@dataclass(frozen=True)
class Made:
    """What the oracle generates for one sample."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logits: list[np.ndarray]  # raw, one row a token


def _says(**values: Any) -> Callable[[list[int]], dict[str, Any]]:
    return lambda base: values


def _same_as_last(x: Any, history: Any, params: Any, ops: Any) -> Any:
    last_R = history.tokens_RL[ops.arange(x.shape[0], like=history.num_known_R), history.num_known_R - 1]
    same_RV = ops.arange(x.shape[1], like=last_R)[None] == last_R[:, None]
    return ops.xp.where(same_RV, x + params["more"], x)


PROCESSOR = LogitsProcessor("again", _same_as_last, {"more": 3.0})


def _again(more: float) -> Callable[[np.ndarray, list[int], list[int]], np.ndarray]:
    def processor(x: np.ndarray, prompt: list[int], output: list[int]) -> np.ndarray:
        x[[*prompt, *output][-1]] += more
        return x

    return processor


def _refused(name: str, value: Any) -> Case:
    return Case(name, "NotImplementedError names it", _says(**{name: value}), refused=True)


ENDS = {"logit_bias": {EOS: 60.0}}  # end-of-text at once
SHOWS = {"logit_bias": {SPECIAL: 60.0, ADDED: 60.0, 8: 60.0}}
# no word of one digit begins one of two here but w3 and w9, which a grammar never sees
FORM = {"choice": [" w30 w91 w92 w33 w39 w38", " w31 w92 w31 w32 w33", " w95 w36 w37 w38 w91"]}
CASES = (
    Case("n", "sample i has the stream of seed + i", _says(n=3), changes="check"),
    Case("temperature", "logits / temperature", _says(temperature=1.9)),
    Case("top_p", "the fewest most likely ids of that mass", _says(top_p=0.3)),
    Case("top_k", "the k most likely ids", _says(top_k=2)),
    Case("min_p", "ids of at least min_p times the likeliest's probability", _says(min_p=0.5)),
    Case("seed", "the noise is a hash of seed, output index and id", _says(seed=77)),
    Case("presence_penalty", "- p if the output has the id", _says(presence_penalty=-2.0)),
    Case("frequency_penalty", "- f for each time in the output", _says(frequency_penalty=-1.8)),
    Case("repetition_penalty", "/ r above 0, else * r, if prompt or output has the id", _says(repetition_penalty=2.5)),
    Case("logit_bias", "+ bias", _says(logit_bias={7: 3.0, "11": 4.0, 20: -5.0})),
    Case("allowed_token_ids", "all others at -inf", _says(allowed_token_ids=range(30, 60))),
    Case(
        "bad_words", "an id that would complete one at -inf", lambda b: {"bad_words": [f"w{b[0]}", f"w{b[2]} w{b[3]}"]}
    ),
    Case("extra_args", "the processor's own formula", _says(extra_args={"again": {"more": 6.0}})),
    Case("structured_outputs", "ids that no output of the form goes on with at -inf", _says(structured_outputs=FORM)),
    Case("max_tokens", "as many tokens, finish_reason length", _says(max_tokens=4)),
    Case("min_tokens", "stop ids at -inf until then", _says(min_tokens=4), ENDS),
    Case("stop", "the text ends before it", lambda b: {"stop": [f"w{b[3]} w{b[4]}", "none"]}),
    Case("stop_token_ids", "ends with it, stop_reason is the id", lambda b: {"stop_token_ids": [b[4]]}),
    Case("ignore_eos", "end-of-text does not end", _says(ignore_eos=True), ENDS | {"min_tokens": 3}),
    Case(
        "repetition_detection",
        "ends with a pattern so many times, finish_reason repetition",
        _says(repetition_detection={"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 2}),
        {"allowed_token_ids": [20, 21]},
    ),
    Case("logprobs", "log softmax of the raw logits, sampled and top, ranks", _says(logprobs=3), changes="check"),
    Case("logprob_token_ids", "those of these ids too", _says(logprob_token_ids=[4, 90]), {"logprobs": 1}, "check"),
    Case("flat_logprobs", "the same in arrays", _says(flat_logprobs=True), {"logprobs": 2}, "check"),
    Case("prompt_logprobs", "those of each prompt token but the first", _says(prompt_logprobs=2), changes="check"),
    Case("prompt_logprob_start", "from there on", _says(prompt_logprob_start=12), {"prompt_logprobs": 1}, "check"),
    Case(
        "prompt_logprob_token_ids",
        "those of the ids given for each",
        _says(prompt_logprob_token_ids=[[i, 96 - i] for i in range(20)]),
        changes="check",
    ),
    Case("detokenize", "no text", _says(detokenize=False), changes="text"),
    Case("skip_special_tokens", "special tokens are in the text", _says(skip_special_tokens=False), SHOWS, "text"),
    Case(
        "spaces_between_special_tokens",
        "no space between two added tokens",
        _says(spaces_between_special_tokens=False),
        SHOWS | {"skip_special_tokens": False},
        "text",
    ),
    Case(
        "include_stop_str_in_output",
        "the stop token is in the text",
        _says(include_stop_str_in_output=True),
        {"stop_token_ids": [36]},
        "text",
    ),
    Case("truncate_prompt_tokens", "the prompt's last so many", _says(truncate_prompt_tokens=9)),
    Case("truncation_side", "right: the prompt's first", _says(truncation_side="right"), {"truncate_prompt_tokens": 9}),
    Case(
        "output_kind", "each output has only what is new", _says(output_kind=RequestOutputKind.DELTA), changes="check"
    ),
    Case("stream_interval", "an output every so many tokens", _says(stream_interval=4), changes="check"),
    Case("skip_reading_prefix_cache", "no cached tokens", _says(skip_reading_prefix_cache=True), changes="check"),
    _refused("thinking_token_budget", 5),
    _refused("watermarking", {"key": 1}),
    _refused("trace_decode_token_ids", [1, 2]),
    _refused("routed_experts_prompt_start", 0),
)


@functools.cache
def prompt_of(name: str) -> list[int]:
    """Of a length that fills two blocks of 8, and no other case's."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(10, VOCAB, 21).tolist()


@functools.cache
def base_of(name: str) -> Made:
    """The case without its field."""
    case = next(c for c in CASES if c.name == name)
    return generate(prompt_of(name), SamplingParams(**(BASE | case.beside)))


def params_of(case: Case) -> SamplingParams:
    return SamplingParams(**(BASE | case.beside | case.asks(base_of(case.name).token_ids)))


@functools.cache
def wanted(name: str, index: int = 0) -> Made:
    """Sample `index` of the case, as the oracle makes it."""
    case = next(c for c in CASES if c.name == name)
    params = params_of(case)
    return generate(prompt_of(name), replace(params, seed=(params.seed or 0) + index, n=1))


def generate(prompt: Sequence[int], p: SamplingParams) -> Made:
    """Token by token, from whole passes of the dense model. Raises where rounding would decide."""
    prompt, out, rows = kept_of(prompt, p), [], []
    stops = {*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))}
    words = tuple(tuple(int(w[1:]) for w in word.split()) for word in p.bad_words or ())
    processors = tuple(_again(extra.get("more", 3.0)) for extra in (p.extra_args or {}).values())
    asked = oracle.asked_of(p, bad_words=words, stop_ids=tuple(sorted(stops)), processors=processors)
    reason: tuple[str, int | str | None] = ("length", None)
    while len(out) < (p.max_tokens or math.inf):
        if p.structured_outputs is not None:
            asked = replace(asked, grammar=_legal(out))
        rows.append(logits(spec_of(TINY), numpy_weights(TINY), [*prompt, *out])[-1])
        token, ahead = oracle.token(rows[-1], asked, prompt, out, seed=p.seed or 0)
        if ahead < 2e-4:
            raise AssertionError(f"token {len(out)} is a tie: choose another seed ({ahead:.1e})")
        out.append(token)
        if token in stops:
            reason = ("stop", token if token != EOS else None)
            break
        rule = p.repetition_detection
        sizes = range(rule["min_pattern_size"], rule["max_pattern_size"] + 1) if rule else ()
        if rule and any(out[-k * rule["min_count"] :] == out[-k:] * rule["min_count"] for k in sizes):
            reason = ("repetition", "repetition_detected")
            break
        found = [s for s in p.stop if s in text_of(out, p)]
        if found and len(out) >= p.min_tokens:
            reason = ("stop", found[0])
            break
    return Made(out, _final_text(out, p, *reason), *reason, rows)


def _legal(out: list[int]) -> frozenset[int]:
    """The ids that go on with FORM, by trying each."""
    said = "".join(f" w{i}" for i in out)
    words = {i for i in range(VOCAB) if any(c.startswith(f"{said} w{i}") for c in FORM["choice"])} - {SPECIAL, EOS}
    return frozenset(words | ({EOS} if said in FORM["choice"] else set()))


def kept_of(prompt: Sequence[int], p: SamplingParams) -> list[int]:
    count = p.truncate_prompt_tokens or len(prompt)
    return list(prompt[-count:] if p.truncation_side == "left" else prompt[:count])


def text_of(ids: Sequence[int], p: SamplingParams) -> str:
    """Words, each behind a space: the first goes on from the prompt."""
    shown, text = [i for i in ids if not p.skip_special_tokens or i not in (SPECIAL, EOS)], ""
    for i, token in enumerate(shown):
        tight = i and not p.spaces_between_special_tokens and {token, shown[i - 1]} <= {SPECIAL, EOS, ADDED}
        text += ("" if tight else " ") + f"w{token}"
    return text


def _final_text(ids: list[int], p: SamplingParams, finish_reason: str, stop_reason: int | str | None) -> str:
    if not p.detokenize:
        return ""
    if isinstance(stop_reason, str) and finish_reason == "stop":
        text = text_of(ids, p)
        return text[: text.index(stop_reason) + (len(stop_reason) if p.include_stop_str_in_output else 0)]
    ends_unseen = finish_reason == "stop" and not p.include_stop_str_in_output
    return text_of(ids[:-1] if ends_unseen else ids, p)


def markdown() -> str:
    """docs/conformance.md."""
    columns = [f"{backend}: {condition}" for backend in ("jax", "torch") for condition in CONDITIONS]
    lines = [
        "# Conformance of SamplingParams",
        "",
        "Made by `make conformance`; do not edit. Each cell is a test (`tests/engine/test_conformance.py`) on a tiny",
        "model, whose logits a dense float64 transformer works out again. **oracle**: tokens, text, reasons and",
        "logprobs are those that the float64 sampler of `tests/sampling_oracle.py` gives, and not those without the",
        "field. **refused**: an error that names the field refuses the request. There is no third kind of cell.",
        "",
        "| Field | Asked | What it does | "
        + " | ".join(f"{b}: {c}" for b in ("jax", "torch") for c in CONDITIONS)
        + " |",
        "|" + "---|" * (3 + 2 * len(CONDITIONS)),
    ]
    for case in CASES:
        cells = ["refused" if case.refused else "oracle"] * len(columns)
        asked = case.asks([] if case.refused else base_of(case.name).token_ids)[case.name]
        lines.append("| " + " | ".join([f"`{case.name}`", f"`{asked}`", case.rule, *cells]) + " |")
    return "\n".join([*lines, ""])


def missing() -> set[str]:
    """Fields that have no row, and rows of no field."""
    return {f.name for f in fields(SamplingParams)} ^ {c.name for c in CASES}


if __name__ == "__main__":
    print(markdown(), end="")
