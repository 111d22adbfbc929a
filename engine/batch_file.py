"""The two files of a batch: lines of requests, and a result a line in the same order, taken up again after a kill."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from .openai_protocol import RequestError, error_object, error_status

ADVICE = "give another output file, or remove this one"
FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True)
class Line:
    """One request: its `number` in the file from 1 on, and an id that says which request it is, there and of what."""

    number: int
    id: str
    data: bytes

    def parse(self) -> dict[str, Any]:
        """The object of the line. Raises RequestError if it is none."""
        try:
            value = json.loads(self.data)
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise RequestError(f"line {self.number} is no JSON: {why}", code="invalid_json") from None
        if not isinstance(value, dict):
            raise RequestError(f"line {self.number} is no JSON object", code="invalid_json")
        return value

    @cached_property
    def custom_id(self) -> str | None:
        """The line's custom_id, None if it has none that can be used."""
        try:
            value = self.parse().get("custom_id")
        except RequestError:
            return None
        return value if isinstance(value, str) and value else None

    def head(self) -> bytes:
        """What this line's result begins with."""
        return f'{{"id": {json.dumps(self.id)}, "custom_id": {json.dumps(self.custom_id)}, '.encode()


def read_lines(data: Iterable[bytes], context: str) -> Iterator[Line]:
    """The requests of an input, blank lines left out. Their ids depend on `context`, place and content."""
    for number, raw in enumerate(data, 1):
        if text := raw.strip():
            digest = hashlib.sha256(b"\0".join((context.encode(), str(number).encode(), text))).hexdigest()
            yield Line(number, f"batch_req_{digest[:24]}", text)


def check_line(value: dict[str, Any]) -> tuple[str, str, Any]:
    """custom_id, url and body of a request. Raises RequestError for what is missing, wrong or unknown."""
    if unknown := sorted(value.keys() - FIELDS):
        raise RequestError(f"unknown field {unknown[0]!r}: a line has {', '.join(sorted(FIELDS))}", param=unknown[0])
    for name in ("custom_id", "method", "url"):
        if not isinstance(value.get(name), str) or not value[name]:
            raise RequestError(f"{name} {value.get(name)!r} is not a string of at least one character", param=name)
    if value["method"] != "POST":
        raise RequestError(f"method {value['method']!r}: POST is right", param="method")
    return value["custom_id"], value["url"], value.get("body")


def success(line: Line, body: Mapping[str, Any], request_id: str | None) -> bytes:
    """The result of a request that was served."""
    response = {"status_code": 200, "request_id": request_id or line.id.removeprefix("batch_"), "body": body}
    return _result(line, response, None)


def failure(line: Line, error: Exception) -> bytes:
    """The result of one that was not. What is no request at all has no response."""
    value = error_object(error)
    if value["code"] == "invalid_json":
        return _result(line, None, value)
    body = {"status_code": error_status(error), "request_id": line.id.removeprefix("batch_"), "body": {"error": value}}
    return _result(line, body, value)


def _result(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    # ASCII: a name may hold half a surrogate pair, which UTF-8 cannot
    rest = json.dumps({"response": response, "error": error}, allow_nan=False)
    return line.head() + rest[1:].encode() + b"\n"


class Results(Protocol):
    """Where results go."""

    def resume(self, lines: Iterator[Line], took: Callable[[Line], None]) -> Iterator[Line]:
        """The requests without a result. Calls `took` with each of those before them, which have one."""
        ...

    def append(self, results: Sequence[bytes]) -> None:
        """Adds whole results. They are safe when it returns."""
        ...

    def close(self) -> None: ...


class PipeResults:
    """A pipe or a terminal: nothing in it is known again."""

    def __init__(self, pipe: BinaryIO):
        self.pipe = pipe

    def resume(self, lines: Iterator[Line], took: Callable[[Line], None]) -> Iterator[Line]:
        return lines

    def append(self, results: Sequence[bytes]) -> None:
        self.pipe.write(b"".join(results))
        self.pipe.flush()

    def close(self) -> None:
        self.pipe.flush()
        if self.pipe is not sys.stdout.buffer:
            self.pipe.close()


class FileResults:
    """A file of one process at a time. A killed one leaves whole results, and perhaps a part of one."""

    def __init__(self, path: Path):
        self.path, self.file = path, open(path, "a+b")  # noqa: SIM115 - close() does
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise ValueError(f"{path} is being written by another process") from None

    def resume(self, lines: Iterator[Line], took: Callable[[Line], None]) -> Iterator[Line]:
        """The requests without a result. A part of one at the end of the file is cut off, and will be made again.

        Raises ValueError, and changes nothing, if these are not the results of these requests.
        """
        self.file.seek(0)
        end = 0
        for number, result in enumerate(self.file, 1):
            line = next(lines, None)
            if line is None:
                raise ValueError(f"{self.path} has more results than there are requests: {ADVICE}")
            whole, head = result.endswith(b"\n") and _is_json(result), line.head()
            length = len(head) if whole else min(len(head), len(result))
            if result[:length] != head[:length]:
                raise ValueError(
                    f"{self.path} line {number} is not the result of line {line.number} of the input "
                    f"(custom_id {line.custom_id!r}) by this model: {ADVICE}"
                )
            if not whole:
                if end + len(result) < os.fstat(self.file.fileno()).st_size:
                    raise ValueError(f"{self.path} line {number} is broken, and more follows it: {ADVICE}")
                self.file.truncate(end)
                return chain([line], lines)
            took(line)
            end += len(result)
        return lines

    def append(self, results: Sequence[bytes]) -> None:
        data = memoryview(b"".join(results))
        while data:
            data = data[os.write(self.file.fileno(), data) :]
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True
