"""Best of n: several samples of each prompt in one compiled program, scored, and the likeliest kept.

    python examples/best_of_n.py [--model smollm2] [--n 4] [--json]

The program is one `jax.jit` (or one call, in torch) that generates and scores the whole batch: nothing is planned
on the host between two tokens. `octavo.engine.functional.generate` can be put into a larger program like this.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.engine import LLM, SamplingParams
from octavo.engine.functional import generate, init_cache, pad_prompts, sampling_columns

QUESTIONS = [
    "What is the capital of Italy?",
    "Name a primary colour.",
    "How many days are in a week?",
]


def best_of_n(llm: LLM, prompts: Sequence[Sequence[int]], n: int, max_tokens: int, temperature: float) -> list[dict]:
    """For each prompt the sample with the highest mean logprob a token, and the scores of all n."""
    ids_SL, lengths_S = pad_prompts([p for p in prompts for _ in range(n)])
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(ids_SL))]
    num_seqs, longest = ids_SL.shape
    cache = init_cache(llm.model, llm.backend, llm.layout, num_seqs, longest, max_tokens)
    score = scoring_program(llm, max_tokens)
    columns = sampling_columns(params, len(params))
    tokens, counts, scores = map(np.asarray, score(llm.runner.weights, cache, ids_SL, lengths_S, columns))
    best = []
    for i in range(len(prompts)):
        of_prompt = scores[i * n : (i + 1) * n]
        at = i * n + int(of_prompt.argmax())
        best.append({"ids": tokens[at, : counts[at]].tolist(), "scores": of_prompt.tolist()})
    return best


def scoring_program(llm: LLM, max_tokens: int) -> Callable[..., Any]:
    """(weights, cache, ids, lengths, columns) -> (tokens, how many of each, mean logprob of each)."""
    eos = min(llm.eos_ids, default=-1)

    def run(weights: Any, cache: Any, ids_SL: Any, lengths_S: Any, columns: Any) -> tuple[Any, Any, Any]:
        made = generate(
            weights, cache, ids_SL, lengths_S, max_tokens, model=llm.model, backend=llm.backend, layout=llm.layout,
            columns=columns, variant="sample", eos=eos,
        )  # fmt: skip
        xp, arange = llm.backend.ops.xp, llm.backend.ops.arange
        real_SM = arange(max_tokens, like=made.num_tokens_S)[None] < made.num_tokens_S[:, None]
        total_S = xp.sum(xp.where(real_SM, made.logprobs_SM, 0.0), axis=-1)
        return made.token_ids_SM, made.num_tokens_S, total_S / made.num_tokens_S

    if llm.backend.name == "jax":
        import jax

        # the cache is not returned, so there is nothing to donate it to
        return jax.jit(run)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Best of n samples of each prompt.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    llm = LLM(args.model, backend=args.backend)
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q}]) for q in QUESTIONS]
    answers = best_of_n(llm, prompts, args.n, args.max_tokens, args.temperature)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        text = tokenizer.decode(answer["ids"])
        if args.json:
            print(json.dumps({"question": question, "answer": text, "scores": answer["scores"]}))
        else:
            print(f"{question}\n  {text}   ({max(answer['scores']):.2f} of {min(answer['scores']):.2f} and up)")


if __name__ == "__main__":
    main()
