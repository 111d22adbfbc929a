"""The figures of compare_vllm_cpu.py as a table, as a page and as the README's section."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- written by benchmarks/compare_vllm_cpu.py --write -->", "<!-- to here -->"
OURS = ("torch", "jax")
PEER = "vllm"
WIDTH = 120


def rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Engine, dtype, tokens a second by case with how many times the peer's that is, and outputs like the first's."""
    for dtype, engines in found["dtypes"].items():
        base = engines.get(PEER, {}).get("tok_s")
        for name, each in engines.items():
            speeds = (speed(each["tok_s"], base, case, name) for case in each["tok_s"])
            yield title(name, each["versions"]), dtype, *speeds, str(each["same_outputs"])


def title(name: str, versions: dict[str, str]) -> str:
    library = ", ".join(f"{n} {v}" for n, v in versions.items() if n != "octavo")
    return f"octavo on {library}" if name in OURS else library


def speed(rates: dict[str, float], base: dict[str, float] | None, case: str, name: str) -> str:
    ratio = f" ({rates[case] / base[case]:.2f}x)" if base and name != PEER else ""
    return f"{rates[case]:.4g}{ratio}"


def heads(found: dict[str, Any]) -> list[str]:
    """Of the columns."""
    cases = next(iter(next(iter(found["dtypes"].values())).values()))["tok_s"]
    return ["engine", "dtype", *(f"{case}, tok/s" for case in cases), "same outputs"]


def table(found: dict[str, Any]) -> Iterator[Any]:
    from rich.table import Table

    shown = Table(*heads(found), title=about(found), title_justify="left")
    for row in rows(found):
        shown.add_row(*row)
    yield shown
    if found["first_token_s"]:
        starts = Table("octavo generate", "first start, s", "warm start, s", title="to the first token")
        for backend, times in found["first_token_s"].items():
            starts.add_row(backend, f"{times['first']:.2f}", f"{times['second']:.2f}")
        yield starts


def about(found: dict[str, Any]) -> str:
    m, s = found["machine"], found["sizes"]
    return f"SmolLM2-135M on {m['cpu']}, {s['threads']} used, Python {m['python']}, {m['date']}"


def markdown(found: dict[str, Any]) -> str:
    """The table, and the line about first tokens."""
    names = heads(found)
    lines = [names, ["---"] * len(names), *rows(found)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    if starts := found["first_token_s"]:
        told = "; ".join(f"{b} {t['second']:.1f} s ({t['first']:.1f} s the first time)" for b, t in starts.items())
        where = "with model file, converted weights and compiled programs in the cache"
        text += "\n" + filled(f"From `octavo generate` in a fresh process to its first token, {where}: {told}.") + "\n"
    return text


def sizes(found: dict[str, Any]) -> str:
    s = found["sizes"]
    return (
        f"greedy, {s['prompt_len']}-token prompts, {s['new']} new tokens, end-of-text ignored, no prefix cache; "
        f"the engines take turns, median of {s['rounds']}"
    )


HOW = """vLLM runs as its manual says (Intel's OpenMP preloaded, compiled) and computes on all of the cores, none
reserved for its other processes, in an environment of its own; transformers is `generate` with a static batch. All read
one folder of safetensors. While one engine computes, the others' processes are stopped. "(1.5x)": times vLLM's tokens a
second in the same dtype. "same outputs": how many of the 32 are the first engine's, token for token; in bfloat16 the
engines round at different places, so they part at near ties."""


def filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def page(found: dict[str, Any]) -> str:
    by = "Written by `python benchmarks/compare_vllm_cpu.py --write`; the numbers as they came: `CPU_vllm.json`."
    where = f"{about(found)} ({found['machine']['system']}): {sizes(found)}."
    parts = "# On a CPU, beside vLLM and transformers", by, filled(where), filled(HOW), markdown(found)
    return "\n\n".join(parts)


def section(found: dict[str, Any]) -> str:
    by = '`benchmarks/compare_vllm_cpu.py`; "(1.5x)": times vLLM\'s in the same dtype; more in `benchmarks/CPU_vllm.md`'
    return f"{BEGIN}\n{filled(f'{about(found)}: {sizes(found)} ({by}):')}\n\n{markdown(found)}{END}"


def write(found: dict[str, Any]) -> None:
    """Both files. Raises ValueError if the README has not the two comments between which the section lies."""
    (HERE / "CPU_vllm.json").write_text(json.dumps(found, indent=1) + "\n")
    (HERE / "CPU_vllm.md").write_text(page(found))
    readme = HERE.parent / "README.md"
    readme.write_text(replaced(readme.read_text(), section(found)))


def replaced(text: str, new: str) -> str:
    """The text with what lies from BEGIN to END, both included, replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no {BEGIN} with {END} behind it")
    return before + new + after
