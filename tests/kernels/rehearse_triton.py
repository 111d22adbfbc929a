"""Rehearses small ops for a GPU that is not there, then calls them: prints what was made here, found, and launched."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from octavo.kernels_triton import fused
from octavo.kernels_triton.ahead import rehearsal
from octavo.kernels_triton.remembered import Kernel, keep, noted, recall

SHARED = 227 * 1024


class NoDevice:
    """What Triton asks of a driver, for an H200; a launch is only told."""

    binary_ext = "cubin"

    class Utils:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED}

        def load_binary(self, *args: Any) -> tuple[None, int, int, int, int]:
            return None, 0, 0, 0, 1024

    utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: print("launched", metadata.name)


def compiled(*, src: Any, cache_hit: bool, **_: Any) -> None:
    # at once: threads say it
    sys.stdout.write(f"{'found' if cache_hit else 'made'} {src.name}\n")


def ops() -> list[torch.Tensor]:
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    q, k = torch.ones(3, 2, 1, 64), torch.ones(3, 2, 64)
    return [fused.rms_norm(x, x[0], 1e-5), fused.rms_norm(x, x[0], 1e-5), *fused.qk_norm(q, k, k[0, 0], k[0, 0], 1e-6)]


def main() -> None:
    driver.set_active(NoDevice())
    knobs.compilation.listener = compiled
    known: list[Kernel] = []
    with rehearsal(torch.device("cpu"), lambda fn, about: known.append(Kernel.of(fn, about))):
        print("zeros", all(not x.any() for x in ops()))
    print("rehearsed")
    ops()
    print("larger")
    # of another size, which nobody rehearsed
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    fused.rms_norm(x, x[0], 1e-5)
    remember(known)


def remember(known: list[Kernel]) -> None:
    """As another process would, which has compiled nothing yet."""
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "lists" / "one.json"
    print("remembered", recall(path, torch.device("cpu")))
    keep(path, known)
    for kernel in known:
        getattr(fused, kernel.name).device_caches.clear()
    print(recall(path, torch.device("cpu")))
    missed: list[Kernel] = []
    with noted(missed):
        ops()
        x = torch.ones(3, 128, dtype=torch.bfloat16)
        fused.rms_norm(x, x[0], 1e-5)
    print("missed", *(kernel.name for kernel in missed))
    keep(path, [replace(known[0], source="another")])
    print("changed", recall(path, torch.device("cpu")))


if __name__ == "__main__":
    main()
