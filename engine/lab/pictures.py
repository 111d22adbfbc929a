"""What the laboratory's pictures are drawn on, and whether one can be drawn, before what it shows is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check_picture(path: Path) -> None:
    """Raises ValueError where no picture can be written: without its folder, its format, or matplotlib."""
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if path.is_dir() or path.suffix[1:].lower() not in known:
        raise ValueError(f"{path} names no picture: it should end in one of .{', .'.join(sorted(known))}")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib, in inches. Raises ValueError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'octavo[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")
