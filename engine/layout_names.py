"""Cache layouts as text: a name of the table or FILE.py:NAME, and behind a colon what it is to be made with."""

from __future__ import annotations

import json
from dataclasses import Field, fields
from typing import Any

from ..models.interface import CacheLayout
from ..models.layouts import LAYOUTS
from .checks import check_names, choice
from .user_code import named_in_file

# as vLLM's users call them; what is no name of a layout is the dtype of a token_major one
KV_CACHE_DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_per_token_head": "fp8_per_token_head",
    "int8": "int8",
    "int8_per_token_head": "int8",
}
LATER_KV_CACHE_DTYPES = ("fp8_e5m2", "fp8_inc", "fp8_ds_mla", "int4_per_token_head", "nvfp4")


def layout_from(text: str, block_size: int) -> CacheLayout:
    """The layout of "head_major", "NAME:field=value,field=value" or "FILE.py:NAME"; values are JSON.

    Raises ValueError for a name that there is not, a field that it has not, or a value that it refuses.
    """
    name, _, last = text.rpartition(":")
    given: dict[str, Any] = {}
    if "=" in last:
        pairs = [pair.partition("=") for pair in last.split(",")]
        for key, _, value in pairs:
            if key.strip() in given:
                raise ValueError(f"layout {text!r}: {key.strip()!r} is given twice")
            given[key.strip()] = _value(text, value)
    else:
        name = text
    if ":" not in name and name not in LAYOUTS:
        raise ValueError(
            f"unknown layout {name!r}: choose one of {', '.join(LAYOUTS)}, FILE.py:NAME, or pass a CacheLayout"
        )
    kind: Any = named_in_file(name) if ":" in name else LAYOUTS[name]
    if not isinstance(kind, type):
        # a value that was made in the file: it has its block size
        check_names(f"field of layout {name!r}", given, ())
        return kind
    known: list[str] = list(getattr(kind, "__dataclass_fields__", ()))
    if "block_size" not in known:
        raise ValueError(f"layout {name!r} is no dataclass with a block_size")
    known.remove("block_size")
    check_names(f"field of layout {name!r}", given, known)
    for field in fields(kind):
        if field.name in given:
            _check_kind(text, field, given[field.name])
    return kind(block_size=block_size, **given)


def kv_cache_dtype(name: str, value: Any) -> str:
    """What KV_CACHE_DTYPES makes of a name. NotImplementedError for what vLLM has and we have not."""
    if value in LATER_KV_CACHE_DTYPES:
        known = ", ".join(KV_CACHE_DTYPES)
        raise NotImplementedError(f"kv_cache_dtype={value!r} is not supported yet: use one of {known}")
    return KV_CACHE_DTYPES[choice(name, value, tuple(KV_CACHE_DTYPES))]


def layout_of_dtype(dtype: str, block_size: int) -> CacheLayout:
    """The layout that a kv_cache_dtype other than "auto" asks for."""
    return LAYOUTS[dtype](block_size) if dtype in LAYOUTS else LAYOUTS["token_major"](block_size, dtype)


def layout_text(layout: CacheLayout) -> str | None:
    """What layout_from makes an equal layout of; None if it is not of the table."""
    name = next((name for name, kind in LAYOUTS.items() if type(layout) is kind), None)
    if name is None:
        return None
    # a default may follow from another field
    plain, names = LAYOUTS[name](layout.block_size), [f.name for f in fields(LAYOUTS[name])]
    values = {n: getattr(layout, n) for n in names if getattr(layout, n) != getattr(plain, n)}
    set_ = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return f"{name}:{','.join(set_)}" if set_ else name


def _value(text: str, value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise ValueError(f"layout {text!r}: {value!r} is no number, true, false or null") from None


def _check_kind(text: str, field: Field[Any], value: Any) -> None:
    """Raises ValueError where a field is annotated with plain types alone, and the value is of none of them."""
    annotation = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    names = {name.strip() for name in annotation.split("|")}
    kind = "None" if value is None else type(value).__name__
    fits = kind in names or (kind == "int" and "float" in names)
    if names <= {"int", "float", "bool", "str", "None"} and not fits:
        raise ValueError(f"layout {text!r}: {field.name} {value!r} is not of type {annotation}")
