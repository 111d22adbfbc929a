"""The borders between the rooms, read off the source: who may import whom, where the environment is read, sizes."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("engine", "kernels_pallas", "kernels_triton", "models", "sharding")

JAX = {"jax", "jaxlib", "flax"}
TORCH = {"torch", "triton", "array_api_compat"}
FORBIDDEN = {"transformers", "octavo"}  # tests compare with the first; sources import the second relatively
MAY_IMPORT_TRANSFORMERS = {"engine/lab/hf_torch.py"}  # it is what is compared with there
MAY_READ_ENVIRONMENT = {"engine/config.py", "engine/loading/cache_dir.py", "engine/backend.py", "engine/backend_jax.py"}
MAY_COUNT_ALL_DEVICES = {"sharding/mesh_jax.py"}
MAX_LINES = 450


def violations(root: Path) -> list[str]:
    """Every breach of a border under root, as "file:line: what"."""
    found = []
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            name, text = path.relative_to(root).as_posix(), path.read_text()
            tree = ast.parse(text, filename=name)
            breaches = [*_import_breaches(name, tree), *_environment_breaches(name, tree), *_except_breaches(tree)]
            breaches += _device_breaches(name, tree)
            found += [f"{name}:{line}: {what}" for line, what in sorted(breaches)]
            if (lines := text.count("\n")) > MAX_LINES:
                found.append(f"{name}:{lines}: more than {MAX_LINES} lines")
    return found + _package_breaches(root)


def _import_breaches(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    room = name.split("/")[0]
    may_jax = room == "kernels_pallas" or (name.endswith("_jax.py") and room != "models")
    may_torch = room == "kernels_triton" or (name.endswith("_torch.py") and room != "models")
    for line, module in _imports(name, tree):
        target = module.split(".")[0]
        if target in JAX and not may_jax:
            yield line, f"imports {module}: jax and flax only in kernels_pallas/ and *_jax.py"
        if target in TORCH and not may_torch:
            yield line, f"imports {module}: torch and triton only in kernels_triton/ and *_torch.py"
        if target in FORBIDDEN and not (target == "transformers" and name in MAY_IMPORT_TRANSFORMERS):
            yield line, f"imports {module}: not in the rooms (our own modules are imported relatively)"
        if target in {f"/{other}" for other in ROOMS} - {f"/{room}"}:
            if room != "engine":
                yield line, f"imports {module[1:]}: {room} imports nothing but itself"
            elif (target == "/kernels_pallas" and not may_jax) or (target == "/kernels_triton" and not may_torch):
                yield line, f"imports {module[1:]}: a kernel room is reached from its backend's files only"


def _imports(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of every import anywhere in a file; ours start with a slash: "/models.step"."""
    package = name.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)]
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            for module in modules:
                yield node.lineno, "/" + ".".join([*base, module])


def _environment_breaches(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if name in MAY_READ_ENVIRONMENT:
        return
    for node in ast.walk(tree):
        used = set()
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
            used = {node.attr}
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            used = {alias.name for alias in node.names}
        if isinstance(node, ast.expr | ast.stmt) and used & {"environ", "environb", "getenv", "putenv"}:
            yield node.lineno, f"touches the environment: only in {', '.join(sorted(MAY_READ_ENVIRONMENT))}"


def _device_breaches(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Of several processes, each must ask its own devices; one that asks the first of all asks another's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.devices" and name not in MAY_COUNT_ALL_DEVICES:
            yield node.lineno, f"asks for jax.devices: only in {', '.join(MAY_COUNT_ALL_DEVICES)}, else local_devices"


def _except_breaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            # cleaning up after whatever happened, and passing it on, is no catching
            cleans_up = caught == "BaseException" and ast.unparse(node.body[-1]) == "raise"
            if caught in ("everything", "Exception", "BaseException") and not cleans_up:
                yield node.lineno, f"catches {caught}: name the errors"


def _package_breaches(root: Path) -> list[str]:
    """Folders that the wheel would miss, since setuptools takes what is listed."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = set(settings["packages"])
    folders = {path.parent for room in ROOMS for path in (root / room).rglob("*.py")}
    there = {"octavo." + folder.relative_to(root).as_posix().replace("/", ".") for folder in folders}
    found = [f"pyproject.toml:1: package {name} is not listed" for name in sorted(there - listed)]
    found += [f"pyproject.toml:1: package {name} does not exist" for name in sorted(listed - there)]
    found += [f"{f.relative_to(root)}:1: no __init__.py" for f in sorted(folders) if not (f / "__init__.py").exists()]
    for room in ROOMS:
        if not (root / room / "py.typed").exists() or "py.typed" not in settings["package-data"][f"octavo.{room}"]:
            found.append(f"{room}:1: py.typed is missing from the folder or from package-data")
    return found


def test_rooms_keep_their_borders():
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_the_map_names_every_file():
    """docs/design.md, section 2. engine/loading/ is one line there."""
    text = (ROOT / "docs" / "design.md").read_text()
    rooms = text.split("\n## 2. ")[1].split("\n## 3. ")[0]
    named = set(re.findall(r"`(?:\w+/)*(\w+\.py)`", rooms))
    files = {path.name: path for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    mapped = {name for name, path in files.items() if path.parent.name != "loading" and name != "__init__.py"}
    assert mapped - named == set()
    assert named - files.keys() - {path.name for path in (ROOT / "tests").glob("*.py")} == set()


def test_there_is_no_root_module():
    assert not (ROOT / "__init__.py").exists(), "octavo is a namespace: see docs/decisions/001"


PLANTED = {
    "jax in an engine file": ("engine/a.py", "import jax.numpy as jnp", "engine/a.py:1: imports jax.numpy"),
    "jax inside a function": ("sharding/a.py", "def f():\n    import jax\n", "sharding/a.py:2: imports jax"),
    "torch in a jax file": ("engine/a_jax.py", "from torch import nn", "engine/a_jax.py:1: imports torch"),
    "jax in models, whatever the name": ("models/a_jax.py", "import jax", "models/a_jax.py:1: imports jax"),
    "triton in models": ("models/layouts/a.py", "\nimport triton\n", "models/layouts/a.py:2: imports triton"),
    "models import engine": ("models/a.py", "from ..engine import plan", "models/a.py:1: imports engine"),
    "models import a bare room": ("models/a.py", "from .. import engine", "models/a.py:1: imports engine"),
    "a nested file leaves its room": (
        "models/layouts/a.py",
        "from ...sharding.rules import RULES",
        "models/layouts/a.py:1: imports sharding.rules",
    ),
    "kernels import models": ("kernels_pallas/a.py", "from ..models import step", "kernels_pallas/a.py:1: imports"),
    "engine reaches kernels past the backend": (
        "engine/a.py",
        "from ..kernels_triton import ops",
        "engine/a.py:1: imports kernels_triton",
    ),
    "an absolute import of ours": ("engine/a.py", "from octavo.models import step", "engine/a.py:1: imports octavo"),
    "transformers": ("engine/a.py", "import transformers", "engine/a.py:1: imports transformers"),
    "os.environ": ("engine/a.py", "import os\nx = os.environ['A']", "engine/a.py:2: touches the environment"),
    "getenv by name": ("models/a.py", "from os import getenv", "models/a.py:1: touches the environment"),
    "the first of all processes' devices": (
        "engine/a_jax.py",
        "import jax\nx = jax.devices()[0]",
        "engine/a_jax.py:2: asks for jax.devices",
    ),
    "except Exception": (
        "engine/a.py",
        "try:\n    f()\nexcept Exception:\n    pass",
        "engine/a.py:3: catches Exception",
    ),
    "except BaseException that swallows": (
        "engine/a.py",
        "try:\n    f()\nexcept BaseException:\n    pass",
        "engine/a.py:3: catches BaseException",
    ),
    "a bare except": ("engine/a.py", "try:\n    f()\nexcept:\n    raise", "engine/a.py:3: catches everything"),
    "a long file": ("engine/a.py", "x = 1\n" * (MAX_LINES + 1), "engine/a.py:451: more than 450 lines"),
    "a package that is not listed": ("engine/odd/a.py", "", "package octavo.engine.odd is not listed"),
    "a folder without __init__": ("engine/odd/a.py", "", "engine/odd:1: no __init__.py"),
}


@pytest.mark.parametrize(("name", "source", "expected"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_breach_is_found(tmp_path, name, source, expected):
    _make_tree(tmp_path)
    assert violations(tmp_path) == []
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(source)
    assert any(expected in found for found in violations(tmp_path))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("engine/a_jax.py", "import jax\nfrom ..kernels_pallas import ops\nfrom ..models import step"),
        ("engine/a_torch.py", "import torch, triton\nfrom ..kernels_triton import ops"),
        ("kernels_pallas/a.py", "import jax\nfrom . import reference"),
        ("engine/loading/a.py", "import numpy\nfrom ...models import step\nfrom ..config import x\nfrom . import b"),
        ("engine/config.py", "import os\nx = os.environ"),
        ("engine/a.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    ],
)
def test_what_is_allowed_is_not_found(tmp_path, name, source):
    _make_tree(tmp_path)
    (tmp_path / name).write_text(source)
    assert violations(tmp_path) == []


def _make_tree(root: Path) -> None:
    """An empty copy of the rooms: folders with __init__.py, py.typed and the real pyproject.toml."""
    (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for package in listed:
        folder = root.joinpath(*package.split(".")[1:])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("")
    for room in ROOMS:
        (root / room / "py.typed").write_text("")
