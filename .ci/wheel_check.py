"""Builds sdist and wheel, installs the wheel with each backend alone in a clean environment, and generates in each.

Everything runs from an empty folder, so that the checkout cannot stand in for what the wheel lacks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("engine", "kernels_pallas", "kernels_triton", "models", "sharding")
OTHER = {"jax": "torch", "torch": "jax"}

PROMPT = "The capital of France is"
EXPECTED = "Paris"

# runs in the clean environment: sys.argv is the backend installed and the one that is not
INSPECT = """
import importlib, importlib.util, pkgutil, sys
from pathlib import Path
import octavo

backend, other = sys.argv[1:]
assert importlib.util.find_spec(other) is None, f"{other} is installed beside {backend}"
(root,) = octavo.__path__
foreign = ({"torch": "kernels_triton", "jax": "kernels_pallas"}[other], f"_{other}")
count = 0
for module in pkgutil.walk_packages([root], "octavo."):
    if foreign[0] in module.name or module.name.endswith(foreign[1]):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        # it comes with a CUDA build of torch; without it nobody reaches these kernels
        if error.name != "triton" or "kernels_triton" not in module.name:
            raise
        continue
    count += 1
rooms = sorted(p.parent.name for p in Path(root).glob("*/py.typed"))
print(f"{backend}: imported {count} modules from {root}; py.typed in {' '.join(rooms)}")
assert rooms == sys.stdin.read().split(), rooms
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="octavo-wheel-") as folder:
        wheel = build(Path(folder))
        check_names(wheel)
        texts = {backend: try_out(wheel, backend, Path(folder)) for backend in OTHER}
    print("wheel check: both backends, each alone, generate from the wheel")
    assert texts["jax"] == texts["torch"], texts


def build(folder: Path) -> Path:
    """The wheel, made from the sdist."""
    run(sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT))
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def check_names(wheel: Path) -> None:
    """Raises unless the wheel holds the rooms and its metadata, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    parts = [name.split("/") for name in names]
    strays = [name for name, p in zip(names, parts, strict=True) if not (p[0] == "octavo" and p[1] in ROOMS)]
    strays = [name for name in strays if ".dist-info/" not in name]
    assert not strays, f"the wheel should hold octavo/ only, but has {strays}"
    missing = [path for path in sources() if f"octavo/{path}" not in names]
    assert not missing, f"the wheel lacks {missing}"
    print(f"{wheel.name}: {len(names)} files")


def sources() -> list[str]:
    """What git tracks in the rooms."""
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.split()


def try_out(wheel: Path, backend: str, folder: Path) -> str:
    """The text that wheel[backend] generates in a new environment."""
    environment, empty = folder / f"env-{backend}", folder / f"empty-{backend}"
    empty.mkdir()
    venv.create(environment, with_pip=True)
    python, octavo = environment / "bin" / "python", environment / "bin" / "octavo"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    run(python, "-m", "pip", "install", "--quiet", *constraints, f"octavo[{backend}] @ {wheel.as_uri()}", cwd=empty)
    print(run(python, "-c", INSPECT, backend, OTHER[backend], cwd=empty, stdin="\n".join(ROOMS)), end="")
    options = ["--model", "smollm2", "--temperature", "0", "--max-tokens", "8"]
    text = run(octavo, "generate", *options, "--prompt", PROMPT, cwd=empty)
    print(f"{backend}: {text.strip()!r}")
    assert EXPECTED in text, f"{backend} should have named {EXPECTED}"
    return text


def run(*command: str | Path, cwd: Path = ROOT, stdin: str = "") -> str:
    """What the command prints; raises with its output when it fails."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, input=stdin, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}\nexit status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
