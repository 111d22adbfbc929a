"""Commands of the laboratory: replay, explain, crosscheck, compare, certify, simulate."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cli_arguments import TakesEngineArguments, engine_arguments, one_model, said
from ..cli_report import Debug, Json, ModelToo, Named, reporting, show
from ..json_file import read_json
from .cli_layouts import layouts

Policy = Annotated[
    str | None,
    typer.Option(help="fcfs, priority, or FILE.py:NAME (rank, evict); none: fcfs, or the logged one."),
]
Log = Annotated[Path, typer.Argument(help="A step log: LLM(..., step_log=FILE) writes one.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command(cls=TakesEngineArguments, epilog="Other engine arguments override the logged ones.")(replay)
    app.command()(explain)
    app.command(cls=TakesEngineArguments, epilog="Every argument of LLM(...) is an option too.")(crosscheck)
    app.command(cls=TakesEngineArguments, epilog="Other engine arguments go to both.")(compare)
    app.command(cls=TakesEngineArguments, epilog="Every argument of LLM(...) is an option too.")(certify)
    app.command()(simulate)
    app.command(cls=TakesEngineArguments, epilog="Every argument of LLM(...) is an option too.")(layouts)


def replay(
    context: typer.Context,
    log: Log,
    to: Annotated[int | None, typer.Option(help="The last step to run.")] = None,
    on: Annotated[str | None, typer.Option(help="Run this backend beside the logged one, and compare.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Runs a logged run again: same decisions, tokens and logits? Names the first difference; exit status 1 then."""
    with reporting(debug):
        from .replaying import replay as run

        found = run(log, to=to, on=on, progress=not as_json, **engine_arguments(context.args))
        if as_json:
            print(json.dumps(asdict(found) | {"ok": found.ok}, default=str))
        else:
            print(_verdict(found))
        if not found.ok:
            raise typer.Exit(1)


def _verdict(found: Any) -> str:
    lines = [f"changed since: {change}" for change in found.changes]
    if found.difference is not None:
        lines.insert(0, f"first difference: {found.difference}")
    ran = f"{found.num_steps} steps, {found.num_tokens} tokens"
    if found.max_error is None:
        lines.append(f"{ran} were equal in every bit")
    else:
        lines.append(f"{ran}; logprobs differ by at most {found.max_error:.1e} (tolerance {found.tolerance:.0e})")
    return "\n".join(lines)


def explain(
    log: Log,
    request: Annotated[str, typer.Argument(help="The request's id.")],
    policy: Policy = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Tells why a request waited, what it hit in the cache, when it was preempted and how it ended."""
    with reporting(debug):
        from .explaining import explain as tell

        show([asdict(p) for p in tell(log, request, policy)], as_json, title=f"request {request}")


# what a step log says itself
OF_A_TRACE = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_caching",
              "overlap", "cost", "measure")  # fmt: skip


def simulate(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="JSON lines of arrival, prompt, output ..., or a step log.")],
    num_blocks: Annotated[int, typer.Option(help="Blocks of the cache, the null block included.")] = 4096,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at a time.")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 2048,
    max_model_len: Annotated[int, typer.Option(help="Tokens of a request.")] = 8192,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse equal beginnings of prompts.")] = True,
    policy: Policy = None,
    overlap: Annotated[bool, typer.Option(help="Plan a step before the one before it is read.")] = True,
    cost: Annotated[str | None, typer.Option(help='Seconds: {"base": 2e-3, "per_token": 2e-5 ...} or a file.')] = None,
    measure: Annotated[str | None, typer.Option(help="Take the cost from steps of this model, run here.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Runs the production scheduler on a trace, with a fake step under a virtual clock; or a step log's decisions."""
    with reporting(debug):
        from .simulate import Simulation, make_scheduler, read_trace

        if _is_step_log(trace):
            if unused := said(context, OF_A_TRACE):
                raise ValueError(f"{trace} is a step log, which says all but the policy: leave out {', '.join(unused)}")
            _show_decisions(trace, policy, as_json)
            return
        scheduler = make_scheduler(
            num_blocks,
            policy=policy or "fcfs",
            block_size=block_size,
            enable_prefix_caching=prefix_caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        simulation = Simulation(scheduler, _cost(cost, measure), overlap=overlap)
        show(simulation.run(read_trace(trace)).to_json(), as_json, title=f"simulation of {trace}, seconds")


def _is_step_log(path: Path) -> bool:
    # bytes: what is no text is for the trace's reader to name
    with open(path, "rb") as file:
        return file.readline().startswith(b'{"header"')


def _show_decisions(log: Path, policy: str | None, as_json: bool) -> None:
    """Whether the scheduler, told what the logged one was told, decides the same."""
    from .rerun import rerun

    found = rerun(log, policy)
    value = {"num_steps": found.num_steps, "num_requests": len(found.requests)}
    show(value | {"difference": str(found.difference) if found.difference else None}, as_json, title=str(log))
    if found.difference is not None:
        raise typer.Exit(1)


def _cost(given: str | None, measured: str | None) -> Any:
    from .cost import measure
    from .simulate import Cost, cost_from

    if given and measured:
        raise ValueError("--cost and --measure: give one of them")
    if measured:
        return measure(measured)
    if given is None:
        return Cost()
    if not given.lstrip().startswith("{"):
        return cost_from(read_json(Path(given)))
    try:
        return cost_from(json.loads(given))
    except json.JSONDecodeError as error:
        raise ValueError(f"--cost {given!r} is no valid JSON: {error}") from error


def crosscheck(
    context: typer.Context,
    named: Named = None,
    model: ModelToo = None,
    against: Annotated[
        str, typer.Option(help="oracle, hf, backend:attention, or FILE.py:NAME; the first decides what is run.")
    ] = "oracle,torch:reference,torch:cpu",
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="May be repeated.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated behind each prompt.")] = 8,
    free_running: Annotated[bool, typer.Option(help="Also let each go on from its own tokens.")] = True,
    separate: Annotated[
        bool | None, typer.Option(help="A process each; by default where several array libraries are needed.")
    ] = None,
    by_layer: Annotated[bool, typer.Option("--by-layer", help="Errors of each layer, not only the worst.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Runs the same steps on several implementations: where do they part, in which layer and op? Exit status 1 then."""
    with reporting(debug):
        from .crosschecking import crosscheck as run
        from .prompts import default_prompts, tokenized

        arguments = _unsaid(engine_arguments(context.args), "backend", "attention", where="in --against")
        name = one_model(named, model)
        found = run(
            name,
            [each.strip() for each in against.split(",")],
            prompts=tokenized(name, prompt or default_prompts()),
            max_tokens=max_tokens,
            free_running=free_running,
            separate=separate,
            **arguments,
        )
        if as_json:
            print(json.dumps([c.to_json() for c in found]))
        else:
            _show_comparisons(found, by_layer)
        if not all(c.ok for c in found):
            raise typer.Exit(1)


def _unsaid(arguments: dict[str, Any], *names: str, where: str) -> dict[str, Any]:
    """The engine arguments. Raises ValueError for one of these names, which is said elsewhere."""
    for name in names:
        if name in arguments:
            raise ValueError(f"--{name} {arguments[name]!r}: say it {where}")
    return arguments


def _show_comparisons(found: Any, by_layer: bool) -> None:
    """Faults first, a line each; then the implementations; then the errors of each op."""
    for c in sorted(found, key=lambda c: c.ok):
        print(f"{c.name}: {c.verdict}")
    names = {"name": "name", "num_tokens": "tokens", "num_agreeing": "equal", "num_ties": "ties"}
    names |= {"free_agreement": "free", "mean_kl": "mean KL", "max_kl": "max KL"}
    rows = [c.to_json() for c in found]
    show([{new: row[old] for old, new in names.items()} for row in rows], False, title=f"against {found[0].reference}")
    which = "" if by_layer else ", the worst of all layers"
    for c in found:
        title = f"{c.name}: greatest errors by op{which}, and % of numbers so many ULPs apart"
        show(c.by_layer() if by_layer else c.by_op(), False, title=title)


def compare(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(help="Engine arguments in TOML.")],
    b: Annotated[Path, typer.Argument(help="Others, to be compared with the first.")],
    prompts: Annotated[Path | None, typer.Option(help="A prompt a line, as text, or as JSON in a .jsonl file.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated behind each prompt.")] = 32,
    rounds: Annotated[int, typer.Option(help="Times are medians of so many runs.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="A .png: KL and latency.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Two engine configurations on the same prompts: first flip, KL by position, latency, memory."""
    with reporting(debug):
        from .compare_plot import draw
        from .comparing import compare as run
        from .pictures import check_picture
        from .prompts import read_prompts

        texts = None if prompts is None else read_prompts(prompts)
        if plot is not None:
            check_picture(plot)
        found = run(a, b, texts, max_tokens=max_tokens, rounds=rounds, **engine_arguments(context.args))
        if plot is not None:
            draw(found, plot)
        if as_json:
            print(json.dumps(found.to_json(), default=str))
            return
        _show_compared(found)


def _show_compared(found: Any) -> None:
    from .comparing import rows_of_prompts

    print(found.verdict)
    for name, (mine, other) in found.differing.items():
        print(f"differs: {name} = {mine!r} in A, {other!r} in B")
    if not found.differing:
        print("both configurations are the same")
    show(list(rows_of_prompts(found)), False, title="prompts: tokens of prompt and output; where B's part from A's")
    show(found.by_position(), False, title="KL(A || B) on A's tokens, nats")
    show(found.costs(), False, title="what it takes")


def certify(
    context: typer.Context,
    backend: Annotated[str, typer.Argument(help="jax, torch, backend:attention, or FILE.py:NAME.")] = "auto",
    model: Annotated[str | None, typer.Option(help="In place of the trace's model.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A golden trace; by default the shipped one, of SmolLM2.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Runs golden traces and says which guarantees hold on this machine. Exit status 1 if one is broken."""
    with reporting(debug):
        from .certifying import certify as run

        arguments = _unsaid(engine_arguments(context.args), "backend", "attention", where="as BACKEND")
        found = run(backend, model=model, trace=trace, **arguments)
        if as_json:
            print(json.dumps([asdict(g) for g in found], indent=2))
        else:
            for g in found:
                print(f"{'held' if g.held else 'BROKEN':6}  {g.name}: {g.evidence}")
        if not all(g.held for g in found):
            raise typer.Exit(1)
