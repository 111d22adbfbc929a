"""The commands `octavo bench latency | throughput | marks`. Options have vLLM's names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cli_arguments import TakesEngineArguments, engine_arguments, said
from ..cli_report import Debug, Json, reporting, show

if TYPE_CHECKING:
    from ..llm import LLM
    from .workloads import Workload

app = typer.Typer(help="Measures latency and throughput, and runs the fixed workloads.", no_args_is_help=True)

MORE = "Every other argument of LLM(...) is an option too: --max-num-seqs 64, --load-format dummy, --dtype bfloat16 ..."
Model = Annotated[str, typer.Option("--model", "-m", help="An alias, a folder, a .gguf file or a hub id.")]
BackendName = Annotated[str, typer.Option("--backend", "-b", help="auto, jax or torch.")]
Seed = Annotated[int, typer.Option(help="Of prompts and lengths, and of dummy weights.")]
NoText = Annotated[bool, typer.Option("--disable-detokenize", help="Leave tokens as they are, without text.")]
Output = Annotated[Path | None, typer.Option(help="A file that takes the result as JSON too.")]


@app.command(cls=TakesEngineArguments, epilog=MORE)
def latency(
    context: typer.Context,
    model: Model = "smollm2",
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(help="Tokens to make behind each.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(help="Batches before those that count.")] = 10,
    num_iters: Annotated[int, typer.Option(help="Batches that count.")] = 30,
    disable_detokenize: NoText = False,
    seed: Seed = 0,
    output_json: Output = None,
    backend: BackendName = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Seconds of one batch of random prompts, from asking to the last token; times to first and between tokens.

    Prefix caching is off unless it is said: every batch has the same prompts.
    """
    with reporting(debug):
        from ..checks import integer
        from .measuring import check
        from .measuring import latency as measure
        from .requests import random_requests

        integer("batch_size", batch_size, 1)
        integer("num_iters_warmup", num_iters_warmup, 0)
        integer("num_iters", num_iters, 1)
        # wrong numbers are said before a model is loaded
        random_requests(batch_size, 2, input_len=input_len, output_len=output_len)
        arguments = {"enable_prefix_caching": False, "seed": seed} | engine_arguments(context.args)
        llm = _engine(model, backend, arguments, output_json)
        asked = random_requests(batch_size, llm.model.vocab_size, input_len=input_len, output_len=output_len, seed=seed)
        check(llm, asked)
        progress = sys.stderr.isatty()
        found = measure(llm, asked, warmup=num_iters_warmup, iterations=num_iters, detokenize=not disable_detokenize,
                        progress=progress)  # fmt: skip
        of_batch = {"batch_size": batch_size, "input_len": input_len, "output_len": output_len}
        _report(llm, model, of_batch | {"num_iters": num_iters}, found, output_json, as_json)


TIMES = {"latency_ms": "to the last token", "ttft_ms": "to the first token", "itl_ms": "from token to token"}
RANDOM = ("input_len", "random_range_ratio", "prefix_len")


@app.command(cls=TakesEngineArguments, epilog=MORE)
def throughput(
    context: typer.Context,
    model: Model = "smollm2",
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests, all at once. Default: 1000; of a dataset all it has.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a random prompt.")] = 128,
    output_len: Annotated[
        int | None, typer.Option(help="Tokens to make. Default: 128; of a dataset what it says, else 128.")
    ] = None,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths lie between len * (1 - ratio) and len * (1 + ratio).")
    ] = 0.0,
    prefix_len: Annotated[int, typer.Option(help="Random tokens that all prompts begin with, before input-len.")] = 0,
    dataset_path: Annotated[
        Path | None,
        typer.Option(help='Prompts: ShareGPT\'s JSON, or .jsonl with a string or {"prompt", "output_tokens"} a line.'),
    ] = None,
    disable_detokenize: NoText = False,
    seed: Seed = 0,
    output_json: Output = None,
    backend: BackendName = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Requests and tokens a second of many requests sent at once. Times to first tokens include waiting for a place.

    Greedy, end-of-text ignored: all tokens that are asked for are made.
    """
    with reporting(debug):
        from ..checks import integer
        from .measuring import check
        from .measuring import throughput as measure
        from .requests import dataset_requests, random_requests

        lengths: dict[str, Any] = {"input_len": input_len, "output_len": output_len or 128}
        lengths |= {"range_ratio": random_range_ratio, "prefix_len": prefix_len}
        for name, value in (("num_prompts", num_prompts), ("output_len", output_len)):
            if value is not None:
                integer(name, value, 1)
        if dataset_path is None:
            random_requests(1, 2, **lengths)
        elif unused := said(context, RANDOM):
            raise ValueError(f"--dataset-path {dataset_path} brings the prompts: leave out {', '.join(unused)}")
        elif not dataset_path.is_file():
            raise ValueError(f"--dataset-path {dataset_path} is no file")
        llm = _engine(model, backend, {"seed": seed} | engine_arguments(context.args), output_json)
        if dataset_path is None:
            asked: Workload = random_requests(num_prompts or 1000, llm.model.vocab_size, **lengths, seed=seed)
        else:
            asked = dataset_requests(dataset_path, llm.get_tokenizer(), num_prompts, output_len=output_len,
                                     longest=llm.memory_plan.max_model_len, seed=seed)  # fmt: skip
        check(llm, asked)
        found = measure(llm, asked, detokenize=not disable_detokenize, progress=sys.stderr.isatty())
        _report(llm, model, {}, found, output_json, as_json)


@app.command(cls=TakesEngineArguments, epilog="Every other argument of LLM(...) is an option too; all engines get it.")
def marks(
    context: typer.Context,
    models: Annotated[
        str, typer.Option(help="llama-8b, qwen3-0.6b, qwen3-30b-a3b, or a folder with a config.json; with commas.")
    ] = "llama-8b,qwen3-0.6b",
    parts: Annotated[
        str | None,
        typer.Option(
            help="check, kernels, attention, decode-1, decode-64, prefill, offline, prefix, identical, profile; with "
            "commas."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where numbers are kept; a part that is there is not run again.")] = Path(
        "marks.json"
    ),
    again: Annotated[bool, typer.Option("--again", help="Run parts again that are there.")] = False,
    only_show: Annotated[bool, typer.Option("--show", help="Run nothing: print the tables of what --out has.")] = False,
    backend: Annotated[
        str, typer.Option("--backend", "-b", help="auto, jax or torch; with a comma both, a column each.")
    ] = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The fixed workloads that peers ran too, on random weights; tables last. Meant for a large GPU.

    Without --parts all that run here: check, kernels, attention and profile need a GPU, kernels a clone. Whoever was
    stopped goes on with the same call.
    """
    with reporting(debug):
        from ..backend import resolve_backend
        from .marks import run, shown
        from .marks_table import report

        chosen, wanted = models.split(","), parts.split(",") if parts is not None else []
        arguments = engine_arguments(context.args)
        if only_show:
            if unused := [*said(context, ("parts", "again")), *context.args]:
                raise ValueError(f"--show runs nothing: leave out {', '.join(unused)}")
            found, backends = shown(out, backend.split(","))
        else:
            backends = list(dict.fromkeys(resolve_backend(name) for name in backend.split(",")))
            found = run(backends, chosen, wanted, out=out, again=again, **arguments)
        print(json.dumps(found, indent=2) if as_json else report(found, backends, chosen))


def _engine(model: str, backend: str, arguments: dict[str, Any], output: Path | None) -> LLM:
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output-json {output}: there is no folder {output.parent}")
    if (most := arguments.get("max_num_queued_reqs")) is not None:
        raise ValueError(f"max_num_queued_reqs {most}: all requests are asked for at once, so leave it out")
    from ..llm import LLM

    return LLM(model, backend=backend, **arguments)


def _report(
    llm: LLM, model: str, asked: dict[str, Any], found: dict[str, Any], output: Path | None, as_json: bool
) -> None:
    """The file first, then JSON, or tables without what is too long for them."""
    from .machine import machine

    on = machine(llm.backend.name, llm.config.device)
    of_engine = {"model": model, "backend": llm.backend.name, "dtype": llm.backend.dtype}
    value: dict[str, Any] = of_engine | asked | found | {"machine": on}
    if output is not None:
        output.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(value, indent=2))
        return
    times = {name: value.pop(name) for name in ("latency_ms", "ttft_ms", "itl_ms")}
    value |= {"machine": json.dumps(on)}
    short = {name: v for name, v in value.items() if name not in ("latencies", "percentiles")}
    show(short, False, title="times in seconds")
    rows = [{"milliseconds": TIMES[name]} | summary for name, summary in times.items() if summary]
    show(rows, False, title="from asking for all")
