"""A logits processor of one's own, written once for JAX and torch: no pair of tokens twice.

    python examples/logits_processor.py [--model smollm2] [--backend jax]

It takes `strength` from every id that already followed the last token before. Requests select it by
`SamplingParams(extra_args={"no_repeated_pair": {"strength": 5.0}})`; those that do not are not touched.
"""

from __future__ import annotations

import argparse
from typing import Any

from octavo.engine import LLM, LogitsProcessor, SamplingParams


def no_repeated_pair(logits_RV: Any, history: Any, params: dict[str, Any], ops: Any) -> Any:
    """logits [R, V] without `strength` where an id would make a pair of tokens that the row has already."""
    xp, tokens_RL, known_R = ops.xp, history.tokens_RL, history.num_known_R
    place_L = ops.arange(tokens_RL.shape[1], like=known_R)
    last_R = tokens_RL[ops.arange(tokens_RL.shape[0], like=known_R), known_R - 1]
    # what lies behind the known tokens is of no meaning
    follows_RL = (tokens_RL[:, :-1] == last_R[:, None]) & (place_L[None, 1:] < known_R[:, None])
    ids_RL = xp.where(follows_RL, tokens_RL[:, 1:], -1)
    seen_RV = ops.tally(ids_RL, xp.ones_like(ids_RL), logits_RV.shape[1])
    return xp.where(seen_RV > 0, logits_RV - params["strength"], logits_RV)


NO_REPEATED_PAIR = LogitsProcessor("no_repeated_pair", no_repeated_pair, {"strength": 100.0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    llm = LLM(args.model, backend=args.backend, logits_processors=[NO_REPEATED_PAIR], max_model_len=512)
    for extra in (None, {"no_repeated_pair": {}}):
        params = SamplingParams(temperature=0, max_tokens=60, extra_args=extra)
        print(f"{extra}:", llm.generate(["One, two, three. One, two,"], params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()
