"""The picture of a comparison: KL by position, and what both configurations take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .comparing import Compared
from .pictures import new_figure

COSTS = (("ttft_ms", "ms to the first token"), ("per_token_ms", "ms a token"), ("peak_bytes", "GiB at the peak"))


def draw(found: Compared, path: Path) -> None:
    """Writes the picture. Raises ValueError without matplotlib."""
    figure = new_figure(10, 4)
    left, *rest = figure.subplots(1, 1 + len(COSTS), width_ratios=(4, 1, 1, 1))
    _draw_kl(left, found)
    for axes, (name, title) in zip(rest, COSTS, strict=True):
        scale = 2**30 if name.endswith("bytes") else 1
        values = [getattr(run, name) / scale for run in (found.a, found.b)]
        bars = axes.bar(["A", "B"], values, color=["tab:gray", "tab:blue"])
        axes.bar_label(bars, fmt="%.3g")
        axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def _draw_kl(axes: Any, found: Compared) -> None:
    """A faint line a prompt, a strong one for the mean of those that go so far."""
    for kl in found.kl:
        axes.plot(kl, color="tab:blue", alpha=0.3, linewidth=1)
    longest = max(map(len, found.kl))
    columns = [[kl[j] for kl in found.kl if j < len(kl)] for j in range(longest)]
    axes.plot([sum(c) / len(c) for c in columns], color="tab:blue", linewidth=2, label="mean of the prompts")
    for prompt in found.prompts:
        if prompt.first_flip is not None:
            axes.axvline(prompt.first_flip, color="tab:red", linestyle=":", linewidth=1)
    # exact ones are 0, which a logarithm does not know
    axes.set_yscale("symlog", linthresh=1e-9)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("output token (dotted: first flips)")
    axes.set_ylabel("KL(A || B), nats")
    axes.legend(loc="upper left", fontsize="small")
