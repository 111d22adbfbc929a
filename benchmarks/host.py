"""What a steady decode step costs the host on the torch path, without a device: graphs are stood in for by nothing.

    python benchmarks/host.py [--requests 256] [--layers 32] [--json]

Everything runs but the kernels: scheduling, laying out the step, filling the graphs' inputs, consuming the state,
taking in tokens. Processor time of two generates of different lengths, by steps: admissions drop out.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from octavo.engine import LLM, SamplingParams, backend_torch
from octavo.engine.graph_torch import Program
from octavo.models import llama
from octavo.models.interface import Output

SHORT, LONG = 40, 240  # tokens of a request
ROWS = 256


class NoGraphs:
    """A recording that replays nothing."""

    def try_out(self, run: Callable[[], Any]) -> tuple[Any, bool]:
        return run(), True

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return (lambda: None), run()

    def finish(self) -> None:
        """There is nothing to wait for."""

    def renew(self) -> None:
        """There is nothing to forget."""


class NoDevice(backend_torch.TorchBackend):
    """The backend of a GPU, on the CPU, whose programs compute nothing."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.capture, self.eager = NoGraphs(), False
        torch.set_num_threads(1)

    def compile(self, fn: Any, args: tuple[str, ...], outs: tuple[str, ...], consumes: str) -> Any:
        at, name = args.index(consumes), getattr(fn, "func", fn).__name__

        def empty(*xs: Any) -> Any:
            made = {
                "hidden": lambda: torch.zeros(ROWS, 8),
                "rows_of_all": dict,
                "output": lambda: Output(torch.full((len(xs[3].hidden_R),), 7, dtype=torch.int32)),
                consumes: lambda: xs[at],
            }
            found = [made[out]() for out in outs] if name.startswith(("forward", "head")) else [xs[at]]
            return tuple(found) if len(found) > 1 else found[0]

        program = Program(
            empty, at=at, weights=args.index("weights") if "weights" in args else -1,
            back=outs.index(consumes) if len(outs) > 1 else None, consume=self.consume, capture=self.capture,
            device=self.device, most_tokens=backend_torch.GRAPH_TOKENS,
        )  # fmt: skip
        self.programs.append(program)
        return program


def engine(layers: int, vocab: int = 1000, blocks: int = 24 * ROWS) -> LLM:
    """One whose programs compute nothing."""
    backend_torch.TorchBackend = NoDevice  # type: ignore[misc]
    model = llama.LlamaConfig(
        vocab_size=vocab, embed_dim=8, mlp_dim=8, num_layers=layers, num_heads=1, num_kv_heads=1, head_dim=8,
        max_model_len=4352,
    )  # fmt: skip
    return LLM(
        llama.spec(model), load_format="dummy", skip_tokenizer_init=True, backend="torch", device="cpu",
        max_model_len=4352, max_num_seqs=ROWS, max_num_batched_tokens=8192, num_gpu_blocks_override=blocks,
    )  # fmt: skip


def measure(requests: int, layers: int) -> float:
    """Microseconds of processor time a steady step."""
    llm = engine(layers)
    prompts, seconds = [[10 + i % 900, i // 900, *range(30)] for i in range(requests)], {}
    for length in (SHORT, SHORT, LONG):
        llm.reset_prefix_cache()
        started = time.process_time()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True), use_tqdm=False)
        seconds[length] = time.process_time() - started
    return (seconds[LONG] - seconds[SHORT]) / (LONG - SHORT) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {n: round(measure(n, args.layers)) for n in args.requests}
    if args.json:
        print(json.dumps({"us_per_step": found, "layers": args.layers, "python": platform.python_version()}))
    for n, us in {} if args.json else found.items():
        print(f"{n} decoding sequences: {us} us a step")


if __name__ == "__main__":
    main()
