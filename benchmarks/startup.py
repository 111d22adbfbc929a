"""Seconds from `octavo generate` in a fresh process to its first token on the screen.

    python benchmarks/startup.py [--repeats 3] [--json]

"first": the model file is there, converted weights and compiled programs are not. "second": all three are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from octavo.engine.loading.aliases import fetch

COMMAND = [str(Path(sys.executable).with_name("octavo")), "generate", "--model", "smollm2", "--prompt",
           "The capital of France is", "--max-tokens", "20", "--temperature", "0"]  # fmt: skip


def first_token(backend: str, cache: Path) -> float:
    """Seconds until something that is not the prompt comes out."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [*COMMAND, "--backend", backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OCTAVO_CACHE": str(cache), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    seen = b""
    while b"Paris" not in seen:
        piece = os.read(process.stdout.fileno(), 64)
        if not piece:
            raise RuntimeError(f"no token came: {seen!r}")
        seen += piece
    seconds = time.perf_counter() - start
    process.stdout.read()
    process.wait()
    return seconds


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds of a first and of a second start, by backend."""
    file = fetch("smollm2")
    results = {}
    for backend in ("torch", "jax"):
        times: dict[str, list[float]] = {"first": [], "second": []}
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                cache = Path(folder)
                shutil.copytree(file.parent, cache / "models" / file.parent.name)
                for start in times:
                    times[start].append(first_token(backend, cache))
        results[backend] = {start: round(statistics.median(t), 2) for start, t in times.items()}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = measure(args.repeats)
    if args.json:
        print(json.dumps(results))
    for backend, row in {} if args.json else results.items():
        print(f"{backend:6} first start {row['first']:.2f} s, second start {row['second']:.2f} s")


if __name__ == "__main__":
    main()
