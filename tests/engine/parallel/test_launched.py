"""Two processes serve one model: JAX's, those of torchrun, and those of a script that called jax.distributed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax  # noqa: F401
import pytest
import torch  # noqa: F401
from oracle import greedy
from tiny import EIGHT_HEADS, GREEDY, PROMPTS, numpy_weights, spec_of

pytestmark = pytest.mark.slow

ENGINE = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import json, os, signal, time
from tiny import EIGHT_HEADS, PROMPTS, engine, tokens
from octavo.engine.errors import RankLostError
def run(**arguments):
    llm = engine(EIGHT_HEADS, **{{"device": "cpu", "tensor_parallel_size": 2, "state_check_interval": 4}} | arguments)
    print("TOKENS", json.dumps(tokens(llm, PROMPTS[:2])), flush=True)
    return llm
"""
LOSES = """
llm = run(backend="jax", distributed_executor_backend="mp")
os.kill(llm.team.peers[0].child.pid, signal.SIGKILL)
began = time.monotonic()
try:
    tokens(llm, PROMPTS[:1])
except RankLostError as error:
    print("LOST", time.monotonic() - began, error, flush=True)
try:
    run(backend="jax", distributed_executor_backend="mp")
except ValueError as error:
    print("AGAIN", error)
print("ENDS", time.time(), flush=True)
sys.exit(7)
"""
ENDS = (
    """
import tempfile
# whoever has made one before JAX is imported has weakref's finalizers run behind JAX's own end
folder = tempfile.TemporaryDirectory()
"""
    + f"""
{ENGINE}
llm = run(backend="jax", distributed_executor_backend="mp")
"""
)
LEAVES = """
run(backend="torch", **{"tensor_parallel_size": 1, sys.argv[1]: 2})
print("ended", flush=True)
"""
MEETS = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
run(backend="jax").shutdown()
"""


def _assert_tokens(out: str) -> None:
    lines = [line.split(" ", 1)[1] for line in out.splitlines() if line.startswith("TOKENS")]
    want = [greedy(spec_of(EIGHT_HEADS), numpy_weights(EIGHT_HEADS), p, GREEDY.max_tokens) for p in PROMPTS[:2]]
    # rank 0's alone
    assert [json.loads(line) for line in lines] == [want]


def test_two_jax_processes_and_one_that_is_killed() -> None:
    """The script ends at once by then, with the status that it chose, and JAX says nothing of it."""
    done = subprocess.run([sys.executable, "-c", ENGINE + LOSES], capture_output=True, text=True, timeout=300)
    ended = time.time()
    _assert_tokens(done.stdout)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("LOST", "AGAIN", "ENDS")))
    assert float(said["LOST"].split()[0]) < 5 and "ended with status -9" in said["LOST"], done.stderr
    assert said["LOST"].endswith("make a new LLM, in a new process")
    assert said["AGAIN"].endswith("make this LLM in a new process")
    assert done.returncode == 7 and "stack trace" not in done.stderr, done.stderr
    assert ended - float(said["ENDS"]) < 15


def test_a_script_need_not_shut_down_jax_processes() -> None:
    """Whatever it did before JAX was imported: JAX's own end comes behind the engine's."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    _assert_tokens(done.stdout)
    assert done.returncode == 0 and "stack trace" not in done.stderr, done.stderr


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_processes_of_torchrun(size: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENGINE + LEAVES)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        size,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    _assert_tokens(done.stdout)
    # the other rank leaves from within LLM(...)
    assert done.stdout.count("ended") == 1


def test_processes_that_met_by_themselves() -> None:
    from octavo.engine.parallel.world_jax import free_address

    where = free_address()
    command = [sys.executable, "-c", ENGINE + MEETS, where]
    ranks = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, stderr=2, text=True) for r in (0, 1)]
    outs = [rank.communicate(timeout=300)[0] for rank in ranks]
    _assert_tokens("".join(outs))
    assert not [line for line in outs[1].splitlines() if line.startswith("TOKENS")]
    assert [rank.returncode for rank in ranks] == [0, 0]
