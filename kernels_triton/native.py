"""cpu_kernels.c: compiled for this machine by its own C compiler, kept, and called. Without a compiler there is none.

Arrays are of `dtype`, and their last axes contiguous where not said otherwise.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor
IsOurs = Callable[[os.stat_result], bool]  # whether nobody else can have written that file
log = logging.getLogger("octavo")

SOURCE = Path(__file__).with_name("cpu_kernels.c")
COMPILERS = ("cc", "gcc")
# errno and traps would keep loops from being vectorised; sums keep their order all the same
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
DEFINES = {torch.float32: (), torch.bfloat16: ("-DBF16",)}
MOST_QUERIES = 64  # of a sequence, that `attend` serves: beyond, products pay
LANES, MOST_DIM = 16, 256  # of attention's heads; as in cpu_kernels.c
NO_WINDOW = 1 << 40
ORDERS = {order: tuple(order.split().index(a) for a in "npk") for order in ("n p k d", "n k p d")}

P, N, F, I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int  # noqa: E741
SIGNATURES = {
    "rms_norm": (P, N, P, F, P, N, N, I),
    "gate_up": (P, P, N, N, I),
    "rope_write": (*(P,) * 10, *(N,) * 18, I),
    "attend": (*(P,) * 7, *(N,) * 15, F, I),
    "pack": (P, N, N, P, N, N, I),
    "look_up": (P, P, P, N, N, N, I),
    "product": (P, N, P, P, F, P, P, N, N, N, I, I),
}


class NotCompiled(Exception):
    """There are no compiled kernels here; says why."""


def load(dtype: torch.dtype, folder: Path, is_ours: IsOurs) -> Native | None:
    """The kernels for arrays of that dtype, compiled into `folder` if they are not there; None, and a line in the log
    that says why, where that cannot be."""
    try:
        return Native(dtype, compiled(dtype, folder, is_ours))
    except (NotCompiled, OSError) as error:
        log.warning("no compiled kernels for this CPU, torch's own ops are used: %s", error)
        return None


def compiled(dtype: torch.dtype, folder: Path, is_ours: IsOurs) -> Path:
    """The library in `folder`, built anew where the one that lies there is not ours."""
    if dtype not in DEFINES:
        raise NotCompiled(f"they are for {' and '.join(str(d) for d in DEFINES)}, not for {dtype}")
    if sys.platform != "linux":
        raise NotCompiled(f"they are for Linux, and this is {sys.platform}")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NotCompiled(f"there is no C compiler ({', '.join(COMPILERS)}) on the PATH")
    wide = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
    command = [compiler, *FLAGS, *wide, *DEFINES[dtype]]
    library = folder / f"cpu-{key(command)}.so"
    if not (library.exists() and is_ours(library.stat())):
        build(command, library)
    return library


def key(command: list[str]) -> str:
    """What a library depends on, as a hash: source, compiler, CPU."""
    compiler = Path(command[0]).resolve()
    # a folder may be shared by machines, and "native" is what this one's CPU has
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Feat"))), ""
    )
    parts = (SOURCE.read_text(), *command, str(compiler), str(compiler.stat().st_mtime_ns), platform.machine(), cpu)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def build(command: list[str], library: Path) -> None:
    """Compiles the library. Those who look while it is written see none, or all of it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made, linked = f"{folder}/kernels.o", f"{folder}/kernels.so"
        # linked without -fopenmp: torch has loaded an OpenMP already, and threads of a second one would be in its way
        for step in ([*command, "-c", str(SOURCE), "-o", made], [command[0], "-shared", made, "-o", linked]):
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                raise NotCompiled(f"{' '.join(step)} failed: {done.stderr.strip()[-400:]}")
        os.chmod(linked, 0o755)
        os.replace(linked, library)


class Native:
    """The compiled kernels. `has_products`: also products, which this CPU does faster than oneDNN."""

    def __init__(self, dtype: torch.dtype, library: Path):
        self.dtype, self.library = dtype, ctypes.CDLL(str(library))
        self.has_products = bool(self.library.has_products())
        for name in SIGNATURES if self.has_products else SIGNATURES.keys() - {"pack", "look_up", "product"}:
            function = getattr(self.library, name)
            function.argtypes, function.restype = SIGNATURES[name], I if name == "look_up" else None

    def norms(self, x: Tensor, scale: Tensor) -> bool:
        """Whether rms_norm is for them."""
        return x.dtype is self.dtype and scale.dtype is self.dtype

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean x^2 + eps) * scale over the last axis."""
        size = x.shape[-1]
        rows = contiguous(x.reshape(-1, size))
        out = torch.empty(x.shape, dtype=x.dtype)
        self.library.rms_norm(
            rows.data_ptr(), rows.stride(0), scale.data_ptr(), eps, out.data_ptr(), len(rows), size,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gated_mlp_act(self, x_TXF: Tensor) -> Tensor:
        """silu(gate) * up."""
        (rows, _, size), x_TXF = x_TXF.shape, x_TXF.contiguous()
        out = torch.empty((rows, size), dtype=x_TXF.dtype)
        self.library.gate_up(x_TXF.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def writes(self, q: Tensor, new: dict[str, Tensor], pools: dict[str, Tensor], order: str, rope: Any) -> bool:
        """Whether rope_write is for them."""
        arrays = (q, *new.values(), *pools.values())
        known = rope is not None and order in ORDERS and pools.keys() == {"k", "v"} and new.keys() == pools.keys()
        return known and all(x.dtype is self.dtype and x.stride(-1) == 1 for x in arrays)

    def rope_write(
        self, q_TKGD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rope: Any, k: Tensor, v: Tensor, order: str, step: Any
    ) -> Tensor:
        """q turned; k turned and v put into the pools k and v, in place, at the step's slots."""
        (tokens, heads, group, dim), (n, p, h) = q_TKGD.shape, ORDERS[order]
        out, ks, vs = torch.empty(q_TKGD.shape, dtype=q_TKGD.dtype), k.stride(), v.stride()
        self.library.rope_write(
            q_TKGD.data_ptr(), k_TKD.data_ptr(), v_TKD.data_ptr(), rope.cos_TD.data_ptr(), rope.sin_TD.data_ptr(),
            step.blocks_T.data_ptr(), step.offsets_T.data_ptr(), out.data_ptr(), k.data_ptr(), v.data_ptr(),
            tokens, heads, group, dim, v_TKD.shape[-1], *q_TKGD.stride()[:3], *k_TKD.stride()[:2], *v_TKD.stride()[:2],
            ks[n], ks[p], ks[h], vs[n], vs[p], vs[h], torch.get_num_threads(),
        )  # fmt: skip
        return out

    def attends(self, q: Tensor, k: Tensor, v: Tensor, order: str, spec: Any, plain: bool) -> bool:
        """Whether attend is for them; `plain`: there are neither sinks nor scales."""
        known = plain and spec.softcap is None and spec.k_dim == spec.v_dim and order in ORDERS
        known = known and spec.k_dim % LANES == 0 and spec.k_dim <= MOST_DIM
        known = known and k.stride(-1) == v.stride(-1) == 1
        return known and q.dtype is k.dtype is v.dtype is self.dtype

    def attend(self, q_TKGD: Tensor, k: Tensor, v: Tensor, order: str, step: Any, spec: Any) -> Tensor:
        """Attention of sequences of up to MOST_QUERIES queries; 0 for padding. Rows of longer ones hold anything."""
        (tokens, heads, group, dim), (n, p, h), q_TKGD = q_TKGD.shape, ORDERS[order], q_TKGD.contiguous()
        out, ks, vs, tables = torch.empty_like(q_TKGD), k.stride(), v.stride(), step.block_tables_SB
        self.library.attend(
            q_TKGD.data_ptr(), k.data_ptr(), v.data_ptr(), step.query_starts_S1.data_ptr(), step.lengths_S.data_ptr(),
            tables.data_ptr(), out.data_ptr(), tokens, tables.shape[0], tables.stride(0), MOST_QUERIES, heads, group,
            dim, k.shape[p], ks[n], ks[p], ks[h], vs[n], vs[p], vs[h], spec.window or NO_WINDOW, spec.scale,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def pack(self, matrix: Tensor, tiles: Tensor) -> None:
        """Fills the tiles of a matrix [depth, columns] of any strides."""
        self.library.pack(
            matrix.data_ptr(), *matrix.stride(), tiles.data_ptr(), *matrix.shape, torch.get_num_threads()
        )  # fmt: skip

    def look_up(self, tiles: Tensor, ids: Tensor, depth: int, columns: int) -> Tensor:
        """[ids, depth]: columns of the matrix."""
        ids, out = ids.int().contiguous(), torch.empty((ids.shape[0], depth), dtype=self.dtype)
        threads = torch.get_num_threads()
        if not self.library.look_up(tiles.data_ptr(), ids.data_ptr(), out.data_ptr(), *out.shape, columns, threads):
            raise IndexError(f"ids {int(ids.min())} .. {int(ids.max())} of a table of {columns} rows")
        return out

    def product(
        self, x: Tensor, tiles: Tensor, columns: int, norm: tuple[Tensor, float] | None, gate: bool, add: Tensor | None
    ) -> Tensor:
        """x [rows, depth] times a weight as blocked.py lays it out: [rows, columns]."""
        (scale, eps), x = norm or (None, 0.0), contiguous(x)
        if {a.dtype for a in (x, scale, add) if a is not None} != {self.dtype}:
            raise ValueError(f"product of {x.dtype} with norm {norm} and add {add}, by kernels for {self.dtype}")
        out = torch.empty((x.shape[0], columns), dtype=x.dtype)
        self.library.product(
            x.data_ptr(), x.stride(0), tiles.data_ptr(), None if scale is None else scale.data_ptr(), eps,
            None if add is None else add.data_ptr(), out.data_ptr(), *x.shape, columns, gate, torch.get_num_threads(),
        )  # fmt: skip
        return out


def contiguous(rows: Tensor) -> Tensor:
    """The rows, each of them contiguous."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
