"""Part "kernels" of `octavo bench marks`: what a clone's own tests say of kernels and engines on this GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..backend import installed_backends

ROOT = Path(__file__).parents[2]
TESTS = ("tests/test_gpu.py", "tests/test_matrix.py", "tests/kernels")
LIMIT = 120  # seconds of a test
MOST = 16  # processes: each has some 2 GB of the GPU, and more than that many compilers gain nothing


def has_tests() -> bool:
    """Whether this package lies in a clone: an installed one has no tests."""
    return all((ROOT / name).exists() for name in TESTS)


def kernels(beside: int = 0) -> dict[str, Any]:
    """The tests with the gpu mark but the slow ones, on all cores but `beside`: how many passed, in which time.

    Kernels against float64 with poison where nobody may read, the pairwise matrix and tokens against the oracle's, of
    every installed backend. Raises ChildProcessError if one fails.
    """
    workers = max(1, min(MOST, _num_cores() - beside))
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", "-p", "no:cacheprovider"]
    # the one warns that it does nothing here; a test that hangs is to be named before the time is up, also where it
    # waits for the GPU, which no signal ends: then its process ends, and another goes on
    pytest += ["-p", "no:benchmark", "--timeout", str(LIMIT), "--timeout-method", "thread"]
    pytest += ["-n", str(workers), "--dist", "worksteal", "--backends", ",".join(installed_backends()), *TESTS]
    # JAX would take three quarters of the GPU in each process, and what a process computes on the CPU all its cores
    command = ["env", "XLA_PYTHON_CLIENT_PREALLOCATE=false", "OMP_NUM_THREADS=1", *pytest]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, file=sys.stderr, flush=True)
    last = done.stdout.strip().rpartition("\n")[2]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}
    if done.returncode or not counts.get("passed"):
        raise ChildProcessError(f"kernels failed: {last or f'pytest ended with {done.returncode}'}; see above")
    return {"passed": counts["passed"], "skipped": counts.get("skipped", 0),
            "seconds": float(re.findall(r"in ([\d.]+)s", last)[0])}  # fmt: skip


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
