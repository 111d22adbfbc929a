"""Several conversations at once over one engine, each answer streamed; one of them is called off in the middle.

python examples/async_chat.py [--model smollm2] [--backend auto] [--max-tokens 40]
"""

from __future__ import annotations

import argparse
import asyncio

from octavo.engine import AsyncLLM, RequestOutputKind, SamplingParams

QUESTIONS = {
    "anna": ["What is the capital of Italy?", "And of France?"],
    "ben": ["Name a primary colour.", "Another one?"],
    "eve": ["Tell me a very long story."],
}


async def talk(engine: AsyncLLM, name: str, questions: list[str], max_tokens: int) -> list[dict[str, str]]:
    """One conversation, question by question. Its later answers find the earlier ones in the prefix cache."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        async for output in engine.chat(messages, params):
            pieces.append(output.outputs[0].text)
        messages.append({"role": "assistant", "content": "".join(pieces)})
        print(f"{name}: {question}\n  -> {messages[-1]['content'].strip()}")
    return messages


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args()
    async with AsyncLLM(options.model, backend=options.backend, load_format=options.load_format) as engine:
        tasks = {
            name: asyncio.create_task(talk(engine, name, questions, options.max_tokens))
            for name, questions in QUESTIONS.items()
        }
        await asyncio.sleep(0.2)
        tasks["eve"].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        stats = await engine.get_stats()
        print(f"{stats.num_running} requests are running, {stats.kv_cache_usage:.0%} of the cache is in use")


asyncio.run(main())
