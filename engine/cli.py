"""The command `octavo`: generate, chat, run-batch, models, plan, bench and the laboratory's.

What is slow to import is imported in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench.cli import app as bench
from .cli_arguments import TakesEngineArguments, engine_arguments, one_model
from .cli_report import Debug, Json, ModelToo, Named, print_error, reporting, show
from .lab.cli import register

if TYPE_CHECKING:
    from .config import EngineConfig
    from .llm import LLM
    from .memory_plan import MemoryPlan
    from .outputs import RequestOutput
    from .sampling_params import SamplingParams

# what a plan for a GPU leaves out, as it starts no backend
NOT_COUNTED = {
    "jax": "not counted, as no GPU was asked: the memory that is free there, which sizes the cache of an engine",
    "torch": "not counted, as no GPU was asked: the memory that is free there, which sizes the cache of an engine, and "
    "second copies of weights (on an H200 6.4 GB of Llama-3.1-8B), which make it smaller",
}
app = typer.Typer(
    help="octavo: an LLM inference engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="Lists, fetches and inspects checkpoints.", no_args_is_help=True)
app.add_typer(models, name="models")
app.add_typer(bench, name="bench")
register(app)

# engine arguments of LLM(...) that no option below names: --max-model-len 2048, --no-enable-prefix-caching ...
MORE = "Every other argument of LLM(...) is an option too: --max-model-len 2048, --tensor-parallel-size 2 ..."

Model = Annotated[str, typer.Option("--model", "-m", help="An alias, a folder, a .gguf file or a hub id.")]
BackendName = Annotated[str, typer.Option("--backend", "-b", help="auto, jax or torch.")]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", help="Text to go on from; may be repeated. Without one: stdin.")
]
System = Annotated[str | None, typer.Option(help="The system message of the chat.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Default: the checkpoint's, else 0.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens that sum up to this.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens this likely, relative to the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")]


@app.command(cls=TakesEngineArguments, epilog=MORE)
def generate(
    context: typer.Context,
    model: Model = "smollm2",
    prompt: Prompts = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message in a chat.")] = False,
    system: System = None,
    n: Annotated[int, typer.Option("-n", help="Samples a prompt.")] = 1,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    json_schema: Annotated[str | None, typer.Option(help="File of a JSON schema that the output must keep to.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the output must match.")] = None,
    backend: BackendName = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Prints what the model makes of one prompt, as it comes, or of many prompts at once."""
    with reporting(debug):
        if system is not None and not chat:
            raise ValueError(f"--system {system!r} needs --chat")
        prompts = prompt or [_read_stdin()]
        sampling = {"n": n, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        sampling |= {"min_p": min_p, "seed": seed, "stop": stop, "ignore_eos": ignore_eos}
        sampling["structured_outputs"] = _form(json_schema, regex)
        llm, params = _engine(model, backend, context, sampling)
        inputs: list[Any] = [_conversation(p, system) for p in prompts] if chat else prompts
        if len(inputs) == 1 and n == 1 and not as_json:
            _write_stream(llm, inputs[0], params)
            return
        run = llm.chat if chat else llm.generate
        outputs = run(inputs, params, use_tqdm=sys.stderr.isatty())
        _print_outputs(prompts, outputs, as_json)
        if wrong := [sample.error for output in outputs for sample in output.outputs if sample.error]:
            raise ValueError(wrong[0])


def _form(json_schema: str | None, regex: str | None) -> dict[str, str] | None:
    """What --json-schema and --regex ask for, as structured_outputs."""
    if json_schema is not None and regex is not None:
        raise ValueError("--json-schema and --regex: give one of them")
    if json_schema is not None:
        return {"json": Path(json_schema).read_text(encoding="utf-8")}
    return None if regex is None else {"regex": regex}


def _print_outputs(prompts: list[str], outputs: list[RequestOutput], as_json: bool) -> None:
    """One JSON object a prompt and line, or text under a heading for each sample."""
    for prompt, output in zip(prompts, outputs, strict=True):
        if as_json:
            samples = [dataclasses.asdict(sample) for sample in output.outputs]
            print(json.dumps({"prompt": prompt, "num_prompt_tokens": len(output.prompt_token_ids), "outputs": samples}))
            continue
        for sample in output.outputs:
            number = f" [{sample.index}]" if len(output.outputs) > 1 else ""
            print(f"== {prompt}{number}\n{sample.text.strip()}\n")


@app.command(cls=TakesEngineArguments, epilog=MORE)
def chat(
    context: typer.Context,
    model: Model = "smollm2",
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    backend: BackendName = "auto",
    debug: Debug = False,
) -> None:
    """Talks with a model. /reset forgets the conversation, /quit (or the end of input) leaves."""
    with reporting(debug):
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        llm, params = _engine(model, backend, context, sampling | {"min_p": min_p, "seed": seed})
        opening = [{"role": "system", "content": system}] if system is not None else []
        messages = list(opening)
        for line in _lines():
            if line == "/quit":
                return
            if line == "/reset":
                messages = list(opening)
            elif line.startswith("/"):
                print(f"unknown command {line}: there are /reset and /quit", file=sys.stderr)
            elif line:
                messages = _answered(llm, [*messages, {"role": "user", "content": line}], params)


def _answered(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> list[dict[str, str]]:
    """The conversation with the answer added. What cannot be answered is reported and taken back."""
    try:
        text = _write_stream(llm, messages, params)
    except ValueError as error:
        print_error(error)
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": text}]


def _lines() -> Iterator[str]:
    """What the user types, or the lines of a pipe."""
    if sys.stdin.isatty():
        # line editing and history for input()
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return


@app.command("run-batch", cls=TakesEngineArguments, epilog=MORE)
def run_batch(
    context: typer.Context,
    source: Annotated[str, typer.Option("--input-file", "-i", help="Lines of requests; - is stdin.")],
    target: Annotated[str, typer.Option("--output-file", "-o", help="Takes a result a line; - is stdout.")],
    model: Model = "smollm2",
    backend: BackendName = "auto",
    debug: Debug = False,
) -> None:
    """Serves a file in OpenAI's batch format. Run again after a kill, it goes on where it was: docs/batch.md."""
    with reporting(debug):
        from .llm import LLM
        from .run_batch import Batch

        # the files first: a wrong one should fail before a model is loaded for it
        with Batch(source, target, model) as batch:
            llm = LLM(model, backend=backend, **engine_arguments(context.args))
            print(batch.run(llm, progress=sys.stderr.isatty()), file=sys.stderr)


@models.command("list")
def list_models(as_json: Json = False, debug: Debug = False) -> None:
    """Lists the models that have an alias, and those in the cache folder."""
    with reporting(debug):
        from .loading import catalog

        entries = catalog.list_models()
        show([dataclasses.asdict(entry) for entry in entries], as_json, title="models")


@models.command()
def pull(name: Annotated[str, typer.Argument(help="An alias or a hub id.")], debug: Debug = False) -> None:
    """Fetches a model into the cache folder and prints where it is."""
    with reporting(debug):
        from .loading import catalog

        print(catalog.pull(name))


@models.command()
def inspect(
    name: Annotated[str, typer.Argument(help="An alias, a folder, a .gguf file or a hub id.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Shows what a checkpoint holds: architecture, sizes, tensors."""
    with reporting(debug):
        from .loading import catalog

        show(catalog.inspect_checkpoint(name), as_json, title=name)


@app.command(cls=TakesEngineArguments, epilog=MORE)
def plan(
    context: typer.Context,
    named: Named = None,
    model: ModelToo = None,
    backend: BackendName = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Shows where the memory would go before anything is allocated; of several devices (--tp 4 --pp 2) also what each
    holds, and what they tell each other in a decode step of --max-num-seqs sequences.
    """
    with reporting(debug):
        from .config import engine_config
        from .parallel.devices import kind_of_step

        name = one_model(named, model)
        config = engine_config(name, backend=backend, **engine_arguments(context.args))
        found = _memory_plan(config)
        shown, n = dataclasses.asdict(found), found.max_num_seqs
        step = kind_of_step(config, n)
        shown["collectives"] = [
            dataclasses.asdict(c) | {"step_bytes": c.count * c.bytes_of(n, n) if c.runs_in(step) else 0}
            for c in found.collectives
        ]
        if found.num_devices == 1:
            del shown["stages"], shown["collectives"]
        show(shown, as_json, title=f"memory plan of {name}, bytes on one device")
        if config.device == "cuda":
            print(NOT_COUNTED[config.backend], file=sys.stderr)


def _memory_plan(config: EngineConfig) -> MemoryPlan:
    """The plan that LLM would follow on that device. Reads the checkpoint's config alone, and starts no backend.

    So "auto" is taken for a CPU, and of a GPU what NOT_COUNTED names is not known.
    """
    from ..models.registry import spec_from_hf
    from .build import host_memory, open_checkpoint, stored_dtype
    from .memory_plan import memory_plan
    from .parallel.shares import divisors_of, fit_model

    checkpoint = open_checkpoint(config)
    model = fit_model(config, spec_from_hf(checkpoint.hf_config))
    device = "cuda" if config.device == "cuda" else "cpu"
    available = host_memory(config) if device == "cpu" else None
    config = config.for_model(model, device, stored_dtype(checkpoint))
    return memory_plan(config, model, divisors=divisors_of(config), available=available)


def _engine(model: str, backend: str, context: typer.Context, sampling: dict[str, Any]) -> tuple[LLM, SamplingParams]:
    """The engine, and what the command line says of sampling, over what the checkpoint says, over greedy."""
    from .llm import LLM
    from .sampling_params import SamplingParams

    said: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    # checked before a model is loaded for it
    SamplingParams(**said)
    llm = LLM(model, backend=backend, **engine_arguments(context.args))
    return llm, SamplingParams(**{"temperature": 0.0, **llm.defaults, **said})


def _conversation(message: str, system: str | None) -> list[dict[str, str]]:
    opening = [{"role": "system", "content": system}] if system is not None else []
    return [*opening, {"role": "user", "content": message}]


def _write_stream(llm: LLM, prompt: Any, params: SamplingParams) -> str:
    """Writes a completion to stdout as it comes; Ctrl-C ends it. Returns the text."""
    pieces = []
    with contextlib.suppress(KeyboardInterrupt):
        for piece in llm.stream(prompt, params):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    print()
    return "".join(pieces)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt TEXT, or pipe one in")
    return sys.stdin.read().rstrip("\n")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
