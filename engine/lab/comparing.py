"""Two engine configurations on the same prompts: where do their tokens part, by how much, and what does each cost?

Each runs in a process of its own, one after the other, so that neither has the other's memory or time.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..arguments import WORKING
from ..checks import integer
from ..config import engine_config
from ..json_file import read_text
from .candidate import Candidate, Forced, Run
from .prompts import default_prompts
from .remote import Remote

# a gap between the two likeliest logits that rounding may turn
TIE = 5e-4
ROWS = 8  # of the printed table of KL by position


@dataclass(frozen=True)
class PromptDifference:
    """One prompt: the first of B's tokens that is not A's, counted from 0; None if there is none."""

    prompt_tokens: int
    output_tokens: int
    first_flip: int | None = None
    a_token: str = ""
    b_token: str = ""
    gap: float | None = None  # of A's logits, between its token and B's
    mean_kl: float = 0.0  # nats a token, teacher-forced

    @property
    def is_tie(self) -> bool:
        return self.gap is not None and self.gap < TIE


@dataclass(frozen=True)
class Compared:
    """What compare found. `kl` has KL(A || B) in nats by prompt and position, on A's tokens; `differing` A's and B's
    values of each argument that is not the same."""

    differing: dict[str, tuple[Any, Any]]
    prompts: list[PromptDifference]
    kl: list[list[float]]
    num_flipped: int  # positions, on A's tokens, where B's likeliest token is another
    a: Run
    b: Run

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.kl))

    @property
    def mean_kl(self) -> float:
        return sum(map(sum, self.kl)) / self.num_positions

    @property
    def max_kl(self) -> float:
        return max(map(max, self.kl))

    @property
    def verdict(self) -> str:
        """A line: how much B's tokens and distributions are those of A."""
        flips = [p for p in self.prompts if p.first_flip is not None]
        same = f"same tokens for {len(self.prompts) - len(flips)} of {len(self.prompts)} prompts"
        if flips:
            first = min(p.first_flip for p in flips if p.first_flip is not None)
            ties = sum(p.is_tie for p in flips)
            same += f" (first flip at token {first}" + (f"; {ties} of the flips are ties)" if ties else ")")
        return f"{same}; KL {self.mean_kl:.1e} nats a token, at most {self.max_kl:.1e}"

    def costs(self) -> list[dict[str, Any]]:
        """A row for each thing measured, of A, of B, and B relative to A."""
        names = [f.name for f in fields(Run) if f.name != "tokens"]
        return [_cost(name, getattr(self.a, name), getattr(self.b, name)) for name in names]

    def by_position(self) -> list[dict[str, Any]]:
        """Mean and greatest KL over ranges of output positions, at most ROWS of them."""
        length = max(map(len, self.kl))
        step, rows = -(-length // ROWS), []
        for first in range(0, length, step):
            part = [x for kl in self.kl for x in kl[first : first + step]]
            last = min(first + step, length) - 1
            span = str(first) if first == last else f"{first}-{last}"
            rows.append({"tokens": span, "mean KL": sum(part) / len(part), "max KL": max(part)})
        return rows

    def to_json(self) -> dict[str, Any]:
        whole = {"verdict": self.verdict, "mean_kl": self.mean_kl, "max_kl": self.max_kl}
        return whole | {"num_positions": self.num_positions} | asdict(self)


def _cost(name: str, a: float, b: float) -> dict[str, Any]:
    return {"what": name, "A": _shown(name, a), "B": _shown(name, b), "B / A": f"{b / a:.2f}" if a else "-"}


def _shown(name: str, value: float) -> str:
    if "bytes" not in name:
        return f"{value:,.4g}"
    return f"{value:,.0f}" if value < 2**20 else f"{value / 2**20:,.1f} MiB"


def compare(
    a: Mapping[str, Any] | str | Path,
    b: Mapping[str, Any] | str | Path,
    prompts: Sequence[str] | None = None,
    *,
    max_tokens: int = 32,
    rounds: int = 3,
    **arguments: Any,
) -> Compared:
    """Runs two configurations (engine arguments as a dict, or a TOML file of them) on the same prompts, greedily.

    `arguments` go to both. Tokens come from free runs; the KL from runs that are told A's tokens. Times are medians
    over `rounds` runs of all prompts at once, after one that warms up. Raises ValueError where vocabularies differ.
    """
    first, second = (read_config(x) | arguments for x in (a, b))
    texts = list(default_prompts() if prompts is None else prompts)
    if not texts:
        raise ValueError("there are no prompts to compare on")
    integer("max_tokens", max_tokens, 1)
    integer("rounds", rounds, 1)
    # what B gets wrong is said before A has run
    for configuration in (first, second):
        engine_config(**configuration)
    with tempfile.TemporaryDirectory(prefix="octavo-compare-") as folder:
        with _candidate(first) as one:
            ids = one.call("encode", texts)
            run_a = one.call("run", ids, max_tokens, rounds)
            one.call("write_logits", ids, run_a.tokens, folder)
        with _candidate(second) as two:
            run_b = two.call("run", ids, max_tokens, rounds)
            forced: list[Forced] = two.call("compare_logits", ids, run_a.tokens, run_b.tokens, folder)
    found = [_of_prompt(*each) for each in zip(ids, forced, strict=True)]
    flipped = sum(f.num_flipped for f in forced)
    return Compared(differing(first, second), found, [f.kl for f in forced], flipped, run_a, run_b)


def read_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Engine arguments from a TOML file, or as they are."""
    if isinstance(source, Mapping):
        return dict(source)
    try:
        return tomllib.loads(read_text(Path(source)))
    except ValueError as error:
        raise ValueError(f'{source} is no TOML file of engine arguments (model = "smollm2"): {error}') from error


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The arguments that are not the same in both: A's value and B's, or the default where one has none."""
    defaults = {argument.name: argument.default for argument in WORKING}
    a, b = defaults | dict(a), defaults | dict(b)
    return {name: (a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)}


def _candidate(arguments: Mapping[str, Any]) -> closing[Remote]:
    """A Candidate in a process of its own, ended on the way out."""
    return closing(Remote(Candidate, dict(arguments)))


def _of_prompt(ids: list[int], forced: Forced) -> PromptDifference:
    mean = sum(forced.kl) / len(forced.kl)
    return PromptDifference(len(ids), len(forced.kl), forced.first_flip, *forced.tokens, forced.gap, mean)


def rows_of_prompts(found: Compared) -> Iterator[dict[str, Any]]:
    """A row a prompt, as it is printed."""
    for i, p in enumerate(found.prompts):
        row: dict[str, Any] = {"prompt": i, "tokens": f"{p.prompt_tokens} + {p.output_tokens}"}
        row |= {"first flip": p.first_flip, "A": p.a_token and repr(p.a_token), "B": p.b_token and repr(p.b_token)}
        yield row | {"gap": p.gap, "mean KL": p.mean_kl}
