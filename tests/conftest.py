"""What holds for every test: required backends, eight virtual CPU devices, no network."""

from __future__ import annotations

import ast
import os
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

# before anything imports huggingface_hub, which reads it once
os.environ["HF_HUB_OFFLINE"] = "1"

# Triton reads it when it is imported: its kernels run on a CPU here, unless there is a GPU to run them
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from backends import BACKENDS

# what a test file may import that an environment with one backend lacks
OPTIONAL = {"jax", "jaxlib", "flax", "torch", "triton", "transformers", "gguf", "openai", "sentencepiece"} | {
    "mistral_common"
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backends",
        default="jax,torch",
        help="the backends that must be installed, and no others: 'jax,torch' (default), 'jax' or 'torch'",
    )


def pytest_configure(config: pytest.Config) -> None:
    wanted = sorted(str(config.getoption("--backends")).split(","))
    if wanted != sorted(BACKENDS):
        raise pytest.UsageError(f"--backends asks for {wanted}, installed are {sorted(BACKENDS)}")
    if "jax" in BACKENDS:
        import jax

        # in the config, not in XLA_FLAGS: subprocesses of tests shall start as a user's would
        jax.config.update("jax_num_cpu_devices", 8)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out test files that import, at their top, a library that --backends leaves out."""
    if collection_path.suffix != ".py" or len(BACKENDS) == 2:
        return None
    missing = {name for name in _top_imports(collection_path) & OPTIONAL if find_spec(name) is None}
    return True if missing else None


def _top_imports(path: Path, seen: frozenset[Path] = frozenset()) -> set[str]:
    """Names the libraries imported at the top of a file, also through helpers in tests/."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= _libraries_of(node.module)
    helpers = {Path(__file__).parent / f"{name}.py" for name in names} - seen - {path}
    for helper in filter(Path.exists, helpers):
        names |= _top_imports(helper, seen | {path})
    return names


def _libraries_of(module: str) -> set[str]:
    """Reads off a module's name what it needs: `octavo.engine.backend_torch` needs torch."""
    names = {module.split(".")[0]}
    if module.startswith("octavo."):
        names |= {"jax"} if "kernels_pallas" in module or module.endswith("_jax") else set()
        names |= {"torch"} if "kernels_triton" in module or module.endswith("_torch") else set()
    return names


@pytest.fixture
def guarded():
    """Triton's interpreter refuses what leaves an argument, and fresh memory is hostile (guarded_triton.py)."""
    from guarded_triton import guarded

    with guarded() as spaces:
        yield spaces


@pytest.fixture(autouse=True, scope="session")
def _no_network():
    """Refuses connections to other machines: a test that fetches anything fails."""
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test may not use the network: connect to {address}")
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield
