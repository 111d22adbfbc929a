"""The engine argument structured_outputs_config: its parts, their defaults, and its check."""

from __future__ import annotations

from typing import Any

from . import checks

STRUCTURED_OUTPUTS = {
    "backend": "auto",
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "compile_timeout": 10.0,
    "compile_memory_gb": 2.0,
    "compile_workers": 2,
    "cache_size": 256,
}
# what only vLLM has
LATER_STRUCTURED_OUTPUTS = {"disable_fallback": False, "reasoning_parser": "", "enable_in_reasoning": False}


def structured_outputs_config(name: str, value: Any) -> dict[str, Any]:
    """A dict of STRUCTURED_OUTPUTS, whole."""
    given = {key: x for key, x in checks.mapping(name, value).items() if x is not None}
    checks.check_names(f"part of {name}", given, (*STRUCTURED_OUTPUTS, *LATER_STRUCTURED_OUTPUTS))
    for key, default in LATER_STRUCTURED_OUTPUTS.items():
        if given.pop(key, default) != default:
            raise NotImplementedError(f"{name}: {key} is not supported yet")
    parts = STRUCTURED_OUTPUTS | given
    if parts["backend"] in ("xgrammar", "outlines", "lm-format-enforcer"):
        raise NotImplementedError(f"{name}: backend {parts['backend']!r} is not supported: use 'guidance' or 'auto'")
    checks.choice(f"{name}: backend", parts["backend"], ("auto", "guidance"))
    for key in ("disable_any_whitespace", "disable_additional_properties"):
        checks.flag(f"{name}: {key}", parts[key])
    for key in ("compile_timeout", "compile_memory_gb"):
        checks.number(f"{name}: {key}", parts[key], 0, 86400, open_low=True)
    for key in ("compile_workers", "cache_size"):
        checks.integer(f"{name}: {key}", parts[key], 1)
    return parts
