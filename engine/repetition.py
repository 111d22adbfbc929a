"""repetition_detection: an output that turns round in a circle ends, with finish_reason "repetition"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .checks import check_names, integer

if TYPE_CHECKING:
    from .request import Request

FIELDS = ("max_pattern_size", "min_pattern_size", "min_count")
STOP_REASON = "repetition_detected"  # as vLLM has it


def checked_repetition(given: Any) -> dict[str, int] | None:
    """A dict of FIELDS, or an object that has them, as a dict; None: nothing is looked for.

    Sizes are in tokens; min_pattern_size 0 is 1, and max_pattern_size 0 looks for nothing. Raises ValueError else.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        if not all(hasattr(given, name) for name in FIELDS):
            raise ValueError(f"repetition_detection {given!r} is not a dict of {', '.join(FIELDS)}")
        given = {name: getattr(given, name) for name in FIELDS}
    check_names("field of repetition_detection", given, FIELDS)
    most, least, count = (integer(f"repetition_detection: {name}", given.get(name, 0), 0) for name in FIELDS)
    if least > most:
        raise ValueError(f"repetition_detection: min_pattern_size {least} is more than max_pattern_size {most}")
    if most and count < 2:
        raise ValueError(f"repetition_detection: min_count {count} is no repetition: give at least 2")
    return {"max_pattern_size": most, "min_pattern_size": max(least, 1), "min_count": count} if most else None


def repeats(output: Sequence[int], rule: Mapping[str, int]) -> bool:
    """Whether an output ends with some pattern min_count times."""
    count = rule["min_count"]
    for size in range(rule["min_pattern_size"], min(rule["max_pattern_size"], len(output) // count) + 1):
        tail = output[len(output) - size * count :]
        # equal to itself one pattern further on
        if tail[size:] == tail[:-size]:
            return True
    return False


def goes_round(r: Request) -> bool:
    """Whether a request ends by its repetition_detection now."""
    rule = r.params.repetition_detection
    return rule is not None and len(r.output) >= r.params.min_tokens and repeats(r.output, rule)
