"""What the engine gives back, as the response objects of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .openai_protocol import Ask
from .outputs import CompletionOutput, Logprob, RequestOutput
from .tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity


def response(
    ask: Ask,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer | None,
    *,
    request_id: str,
    created: int,
    model: str,
) -> dict[str, Any]:
    """The answer to `ask`: `outputs` has the finished output of each of its prompts. `created` is in Unix seconds."""
    make = _chat_choice if ask.chat else _completion_choice
    pairs = [(output, sample) for output in outputs for sample in output.outputs]
    return {
        "id": ("chatcmpl-" if ask.chat else "cmpl-") + (ask.request_id or request_id),
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [make(i, ask, output, sample, tokenizer) for i, (output, sample) in enumerate(pairs)],
        "usage": usage(outputs, silent=ask.silent),
    }


def usage(outputs: Iterable[RequestOutput], *, silent: bool = False) -> dict[str, int]:
    """How many tokens went in and came out (none if silent). Each prompt counts once, whatever n is."""
    outputs = list(outputs)
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    completion = 0 if silent else sum(len(sample.token_ids) for o in outputs for sample in o.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _chat_choice(
    index: int, ask: Ask, output: RequestOutput, sample: CompletionOutput, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    logprobs = None
    if ask.top_logprobs is not None:
        logprobs = {"content": [_content(ask, i, at, tokenizer) for i, at in _positions(sample)], "refusal": None}
    text = ask.echo + sample.text if isinstance(ask.echo, str) else sample.text
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs} | _end(ask, output, sample)


def _completion_choice(
    index: int, ask: Ask, output: RequestOutput, sample: CompletionOutput, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    before = _prompt_text(output, tokenizer) if ask.echo else ""
    logprobs = None
    if ask.top_logprobs is not None:
        echoed = zip(output.prompt_token_ids, output.prompt_logprobs or ()) if ask.echo else ()
        logprobs = _legacy(ask, [*echoed, *(() if ask.silent else _positions(sample))], tokenizer)
    text = before if ask.silent else before + sample.text
    return {"index": index, "text": text, "logprobs": logprobs} | _end(ask, output, sample)


def _end(ask: Ask, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
    """What both kinds of choice end with; stop_reason and what follows it are vLLM's."""
    end: dict[str, Any] = {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
    if ask.silent:
        end = {"finish_reason": "length", "stop_reason": None}
    if ask.return_token_ids:
        ids = [] if ask.silent else list(sample.token_ids)
        end |= {"token_ids": ids, "prompt_token_ids": list(output.prompt_token_ids)}
    if ask.prompt_logprobs:
        end["prompt_logprobs"] = [None if at is None else _entries(at) for at in output.prompt_logprobs or ()]
    return end


def _entries(at: Mapping[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(i): {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token} for i, p in at.items()
    }


def _positions(sample: CompletionOutput) -> Iterable[tuple[int, Mapping[int, Logprob]]]:
    """Each token of the output with its logprobs."""
    return zip(sample.token_ids, sample.logprobs or (), strict=True)


def _content(ask: Ask, token_id: int, at: Mapping[int, Logprob], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One entry of a chat's logprobs.content: `bytes` of all tokens in a row are the text's."""
    top = [_token(ask, i, p, tokenizer) for i, p in _best(at, ask.top_logprobs or 0)]
    return _token(ask, token_id, at[token_id], tokenizer) | {"top_logprobs": top}


def _token(ask: Ask, token_id: int, p: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id) if tokenizer else b""
    return {"token": _name(ask, token_id, p), "logprob": _finite(p.logprob), "bytes": list(data)}


def _legacy(
    ask: Ask, positions: Sequence[tuple[int, Mapping[int, Logprob] | None]], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The logprobs of a completion: four lists with an entry a token. `text_offset` is where it begins in the text."""
    start = 0
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, at in positions:
        if at is None:
            # nothing comes before a prompt's first token
            text = tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer else ""
            name, logprob, top = f"token_id:{token_id}" if ask.tokens_as_ids else text, None, None
        else:
            p = at[token_id]
            text, name, logprob = p.decoded_token or "", _name(ask, token_id, p), _finite(p.logprob)
            top = {_name(ask, i, q): _finite(q.logprob) for i, q in _best(at, ask.top_logprobs or 0)} or None
        for key, value in zip(found, (name, logprob, top, start)):
            found[key].append(value)
        start += len(text)
    return found


def _best(at: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The most likely ones, the likeliest first; the sampled one only if it is among them."""
    return sorted(at.items(), key=lambda item: item[1].rank)[:count]


def _name(ask: Ask, token_id: int, p: Logprob) -> str:
    return f"token_id:{token_id}" if ask.tokens_as_ids else p.decoded_token or ""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _prompt_text(output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    if output.prompt is not None:
        return output.prompt
    return tokenizer.decode(output.prompt_token_ids) if tokenizer else ""
