"""On what a measurement was made: its figures mean nothing without."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = {"torch": ("torch", "triton"), "jax": ("jax", "jaxlib")}


def software(*packages: str) -> dict[str, Any]:
    """The day, and the versions of Python and of these packages."""
    versions = {name: version(name) for name in packages}
    return {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "versions": versions}


def gpu(*fields: str) -> str:
    """What nvidia-smi says of the GPU: these fields, with commas between them; "" where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def cpu() -> str:
    """The processor's name, and how many cores this process may use."""
    path, name = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if path.exists():
        names = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {name}"


def machine(backend: str, device: str) -> dict[str, Any]:
    """The device, "cpu" or "cuda", by its name; the day; versions of what the backend stands on."""
    # of several GPUs that are alike one line says enough
    told = "; ".join(dict.fromkeys(gpu("name", "driver_version").splitlines()))
    on = {"gpu": told} if device == "cuda" else {"cpu": cpu()}
    # a CPU build of torch brings no triton
    packages = [name for name in PACKAGES[backend] if name != "triton" or device == "cuda"]
    return on | software("octavo", *packages, "numpy")
