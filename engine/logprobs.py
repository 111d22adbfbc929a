"""Logprobs as a user gets them: an entry a position, in lists of dicts or in one compact container."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, overload

from .outputs import Logprob, logprobs_of
from .plan import Read
from .request import Request
from .tokenizer import Tokenizer

Entry = dict[int, Logprob]


class FlatLogprobs(Sequence[Entry | None]):
    """Reads as a list of entries, and holds what they hold in one array a field: few objects, however many tokens.

    The entry of position i is in places start_indices[i] to end_indices[i] - 1 of `token_ids`, `logprobs`, `ranks` and
    `decoded_tokens`; where there are none it reads as None.
    """

    def __init__(self, entries: Iterable[Entry | None] = ()):
        self.start_indices, self.end_indices = array("q"), array("q")
        self.token_ids, self.ranks, self.logprobs = array("i"), array("i"), array("d")
        self.decoded_tokens: list[str | None] = []
        for entry in entries:
            self.append(entry)

    def append(self, entry: Entry | None) -> None:
        self.start_indices.append(len(self.token_ids))
        for token_id, found in (entry or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(found.logprob)
            self.ranks.append(found.rank)
            self.decoded_tokens.append(found.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, i: int) -> Entry | None: ...

    @overload
    def __getitem__(self, i: slice) -> FlatLogprobs: ...

    def __getitem__(self, i: int | slice) -> Entry | FlatLogprobs | None:
        if isinstance(i, slice):
            return FlatLogprobs(self[n] for n in range(*i.indices(len(self))))
        each = range(self.start_indices[i], self.end_indices[i])
        found = {self.token_ids[n]: Logprob(self.logprobs[n], self.ranks[n], self.decoded_tokens[n]) for n in each}
        return found or None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FlatLogprobs({len(self)} positions, {len(self.token_ids)} logprobs)"


def container(flat: bool) -> Any:
    """What a request's entries are collected in."""
    return FlatLogprobs() if flat else []


def entry_of(
    found: Any,
    at: int,
    token_id: int,
    num: int,
    token_ids: Sequence[int],
    *,
    tokenizer: Tokenizer | None,
    context_ids: Sequence[int],
) -> Entry:
    """The entry of row `at` of a StepResult or ReadResult: the token itself, the `num` most likely, then token_ids."""
    top_ids = found.top_ids[at, :num].tolist() if num else []
    top_logprobs = found.top_logprobs[at, :num].tolist() if num else []
    given = ()
    if token_ids:
        given = zip(token_ids, found.id_logprobs[at].tolist(), found.id_ranks[at].tolist())
    return logprobs_of(
        token_id, float(found.logprobs[at]), int(found.ranks[at]), top_ids, top_logprobs, given,
        tokenizer=tokenizer, context_ids=context_ids,
    )  # fmt: skip


def prompt_entries(request: Request, read: Read, found: Any, tokenizer: Tokenizer | None) -> Iterable[Entry]:
    """The entries of the tokens behind those of a read."""
    for i, target in enumerate(read.targets):
        place = read.start + 1 + i
        yield entry_of(
            found, i, target, read.num_logprobs, read.token_ids[i] if read.token_ids else (),
            tokenizer=tokenizer, context_ids=request.prompt[max(0, place - 4) : place],
        )  # fmt: skip
