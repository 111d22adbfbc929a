"""The picture of layouts: what a token takes against what it costs in quality, and a step's time against context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .layouts import NOISE, Measured
from .pictures import new_figure

LOWEST = 1e-7  # where the exact ones are drawn, which a logarithm does not know


def draw(found: Sequence[Measured], path: Path, title: str) -> None:
    """Writes the picture. Raises ValueError without matplotlib."""
    figure = new_figure(11, 4.6)
    figure.suptitle(title, fontsize="medium")
    left, right = figure.subplots(1, 2)
    _draw_quality(left, found)
    _draw_times(right, found)
    figure.savefig(path, dpi=100)


def _draw_quality(axes: Any, found: Sequence[Measured]) -> None:
    """A point a layout; those that lie on one another share a label."""
    labels: dict[tuple[float, float], list[str]] = {}
    for i, m in enumerate(found):
        at = m.bytes_a_token_sent / 1024, max(m.kl, LOWEST)
        axes.plot(*at, "o" if m.keeps == "all" else "s", color=f"C{i % 10}", markersize=8)
        key = next((k for k in labels if abs(k[0] / at[0] - 1) < 0.02 and 0.6 < k[1] / at[1] < 1.6), at)
        labels.setdefault(key, []).append(m.layout)
    for at, names in labels.items():
        axes.annotate("\n".join(names), at, xytext=(8, 4), textcoords="offset points", fontsize="small")
    axes.set_yscale("log")
    axes.set_xlim(0, 1.3 * max(m.bytes_a_token_sent for m in found) / 1024)
    axes.set_ylim(LOWEST / 3, 3 * max(10 * NOISE, *(m.kl for m in found)))
    axes.axhline(LOWEST, color="gray", linewidth=0.8, linestyle=":")
    axes.text(0.01, LOWEST * 1.2, " exact", fontsize="small", color="gray", transform=axes.get_yaxis_transform())
    axes.set_xlabel("KiB of cache a token of a long request takes (less is better)")
    axes.set_ylabel("KL from exact, nats a token (less is better)")
    axes.set_title("memory against quality (squares: drop tokens)", fontsize="medium")
    axes.grid(alpha=0.3)


def _draw_times(axes: Any, found: Sequence[Measured]) -> None:
    for i, m in enumerate(found):
        axes.plot(*zip(*m.step_ms.items(), strict=True), "-o" if i < 10 else "--o", color=f"C{i % 10}", markersize=4,
                  label=m.layout)  # fmt: skip
    contexts = list(found[0].step_ms)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, list(map(str, contexts)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens before the new one")
    axes.set_ylabel("ms a decode step of one request (less is better)")
    axes.set_title("time against context", fontsize="medium")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
