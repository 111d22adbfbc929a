"""The command `octavo layouts`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checks import size
from ..cli_arguments import engine_arguments, one_model, said
from ..cli_report import Debug, Json, ModelToo, Named, reporting, show
from ..json_file import read_text

# what is for measuring alone
MEASURING = ("text", "window", "prompt", "contexts", "memory", "max_model_len", "plot")
Layouts = Annotated[
    list[str] | None,
    typer.Option("--layout", help="A name, NAME:field=value,..., or FILE.py:NAME; may be repeated. None: all."),
]


def layouts(
    context: typer.Context,
    named: Named = None,
    model: ModelToo = None,
    layout: Layouts = None,
    check: Annotated[bool, typer.Option(help="Only check that each writes and reads what it should.")] = False,
    text: Annotated[Path | None, typer.Option(help="Measure quality on this file; none: on a text of ours.")] = None,
    window: Annotated[int, typer.Option(help="Tokens of the pieces into which the text is cut.")] = 640,
    prompt: Annotated[int, typer.Option(help="Tokens of each piece that are its prompt; the rest are scored.")] = 512,
    contexts: Annotated[str, typer.Option(help="Tokens in the cache when a step is timed.")] = "256,1024,4096",
    memory: Annotated[str, typer.Option(help="Bytes of cache that blocks are to fit: 1G, 512M ...")] = "1G",
    max_model_len: Annotated[str, typer.Option(help="Tokens of a request, of which to count how many fit.")] = "8K",
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw a picture: FILE.png.")] = None,
    debug: Debug = False,
) -> None:
    """Compares cache layouts: bytes, what fits, step time, and how far their logits are from exact ones."""
    with reporting(debug):
        name, arguments = one_model(named, model), engine_arguments(context.args)
        if check:
            if unused := said(context, MEASURING):
                raise ValueError(f"--check measures nothing: leave out {', '.join(unused)}")
            _check(name, layout or (), as_json, arguments)
            return
        from .layouts import measure_layouts
        from .layouts_plot import draw
        from .pictures import check_picture
        from .prompts import tokenized
        from .text import TEXT

        if plot is not None:
            check_picture(plot)
        (ids,) = tokenized(name, [TEXT if text is None else read_text(text)])
        with _telling(not as_json) as tell:
            found = measure_layouts(
                name,
                layout or (),
                text=ids,
                window=window,
                prompt=prompt,
                contexts=[size("contexts", c.strip(), 1) for c in contexts.split(",")],
                memory=size("memory", memory, 1),
                max_model_len=size("max_model_len", max_model_len, 1),
                tell=tell,
                **arguments,
            )
        if plot is not None:
            draw(found, plot, f"cache layouts of {name}, {found[0].num_tokens} tokens of text")
        if as_json:
            print(json.dumps([asdict(m) | {"exact": m.exact} for m in found]))
        else:
            _show(found, memory, max_model_len)


def _show(found: Sequence[Any], memory: str, max_model_len: str) -> None:
    rows = []
    for m in found:
        row = {"layout": m.layout, "keeps": m.keeps, "bytes a token": f"{m.bytes_a_token:,.0f}"}
        row |= {f"blocks in {memory}": m.num_blocks, f"requests of {max_model_len}": f"{m.num_requests:,.1f}"}
        row |= {f"ms at {c}": f"{ms:.1f}" for c, ms in m.step_ms.items()}
        row |= {"perplexity": f"{m.perplexity:.3f}", "KL": "0" if m.exact else f"{m.kl:.1e}"}
        rows.append(row | {"max KL": "0" if m.exact else f"{m.max_kl:.1e}", "flips": f"{m.flip_rate:.1%}"})
    show(rows, False, title=f"{found[0].num_tokens} tokens of text; KL and flips against {found[0].layout}")


@contextmanager
def _telling(wanted: bool) -> Iterator[Any]:
    """What is being measured, on stderr, while it is measured."""
    from rich.console import Console

    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield lambda what: None
        return
    with console.status("") as status:
        yield status.update


def _check(model: str, named: Sequence[str], as_json: bool, arguments: dict[str, Any]) -> None:
    from ...models.layouts import LAYOUTS
    from ...models.registry import spec_from_hf
    from ..backend import find_platform, get_backend
    from ..build import backend_options, open_checkpoint
    from ..config import engine_config
    from .layout_checks import check_layout

    found: dict[str, Any] = {}
    for name in named or tuple(LAYOUTS):
        config = engine_config(model, layout=name, **arguments)
        spec = spec_from_hf(open_checkpoint(config).hf_config)
        if config.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype {config.dtype!r}: layouts are checked in float32")
        find_platform(config.backend, config.device)
        backend = get_backend(config.backend, backend_options(config, None) | {"dtype": "float32"})
        found[name] = [asdict(c) for c in check_layout(config.layout, backend, spec.attention[0])]
    if as_json:
        print(json.dumps(found))
    for name, checks in () if as_json else found.items():
        rows = [{"check": c["check"], "": "ok" if c["ok"] else "WRONG", "found": c["found"]} for c in checks]
        show(rows, False, title=name)
    if not all(c["ok"] for checks in found.values() for c in checks):
        raise typer.Exit(1)
