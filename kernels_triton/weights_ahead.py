"""The next product's weight asked into the cache of the device, while small kernels leave its memory idle.

A decode step is products, which are bound by reading their weights, and small kernels between them, which read next to
nothing. So behind each product some programs ask for the first bytes of the next one's weight. They ask and end: what
is asked for is on its way, nobody waits for it, and no result depends on it.

Which weight is next is learnt: the run op by op that goes before each recording calls the same products in the same
order. So it is in recorded graphs alone that anything is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from .early import early, take_turn
from .few_rows import device_name

Tensor = torch.Tensor

# where programs that ask run: on a stream beside, from when the product has ended, waited for at the graph's end;
# in a launch of their own between the product and the next kernel; or as some programs more of that kernel
PLACES = ("beside", "between", "within")


class Asking(NamedTuple):
    """How weights are asked for.

    `bulk`: in pieces, by the unit that copies arrays, else line by line. `keep`: what was asked for leaves the cache
    last.
    """

    most_bytes: int  # of a weight
    place: str = "within"
    programs: int = 32
    bulk: bool = True
    keep: bool = False


# as measured (benchmarks/weights_ahead.py), by device: the most rows of a product that a rule is for, then an Asking.
# Nothing: nothing is asked for
TABLE: dict[str, dict[int, Asking]] = {}


def asking_of(num_rows: int, device: torch.device) -> Asking | None:
    """How the weight behind a product of so many rows is asked for; None: it is not."""
    rules = TABLE.get(device_name(device), {})
    fits = [most for most in rules if num_rows <= most]
    return rules[min(fits)] if fits else None


class Ask(NamedTuple):
    """The first bytes of a weight, and how they are asked for."""

    weight: Tensor  # as bytes
    num_bytes: int
    how: Asking


PIECE = tl.constexpr(4096)  # bytes that one thread of a warp asks for at once
LINE = tl.constexpr(128)
# asks for $2 bytes from $1 on, or for the line of $1; below 1, for nothing
IF_ANY = "{ .reg .pred any; .reg .b64 last; setp.gt.s32 any, $2, 0; mov.u32 $0, 0; "
LAST = "createpolicy.fractional.L2::evict_last.b64 last, 1.0; "
ASK_PIECE = tl.constexpr(IF_ANY + "@any cp.async.bulk.prefetch.L2.global [$1], $2; }")
KEEP_PIECE = tl.constexpr(IF_ANY + LAST + "@any cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], $2, last; }")
ASK_LINE = tl.constexpr(IF_ANY + "@any prefetch.global.L2 [$1]; }")
KEEP_LINE = tl.constexpr(IF_ANY + "@any prefetch.global.L2::evict_last [$1]; }")


@triton.jit
def place_of(i, BULK: tl.constexpr, THREADS: tl.constexpr):
    """The byte at which each thread asks in round i. For pieces, one warp does: the others ask beyond all ends."""
    thread_L = tl.arange(0, THREADS)
    if BULK:
        place_L = tl.where(thread_L < 32, (i * 32 + thread_L) * PIECE, 0x7FFFFFFF)
    else:
        place_L = (i * THREADS + thread_L) * LINE
    return place_L


@triton.jit
def ask_at(place_L, left_L, BULK: tl.constexpr, KEEP: tl.constexpr):
    """Asks for what each thread is to ask for: left_L bytes, or a line if there are any."""
    ASM: tl.constexpr = (KEEP_PIECE if KEEP else ASK_PIECE) if BULK else (KEEP_LINE if KEEP else ASK_LINE)
    tl.inline_asm_elementwise(ASM, "=r,l,r", [place_L, left_L], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_for(weight, num_bytes, program, num_programs, BULK: tl.constexpr, KEEP: tl.constexpr):
    """This program's rounds of the first bytes of the weight: of so many programs, each takes its turn."""
    THREADS: tl.constexpr = num_threads()
    ROUND: tl.constexpr = 32 * PIECE if BULK else THREADS * LINE
    for i in range(program, tl.cdiv(num_bytes, ROUND), num_programs):
        place_L = place_of(i, BULK, THREADS)
        ask_at(weight + place_L, tl.minimum(num_bytes - place_L, PIECE), BULK, KEEP)


@triton.jit
def only_asks(ahead, num_ahead, num_askers, BULK: tl.constexpr, KEEP: tl.constexpr):
    """Whether this program is one of the last num_askers of axis 0, times those of axis 1: it has asked then."""
    first, across = tl.num_programs(0) - num_askers, tl.num_programs(1)
    asks = tl.program_id(0) >= first
    if asks:
        program = (tl.program_id(0) - first) * across + tl.program_id(1)
        ask_for(ahead, num_ahead, program, num_askers * across, BULK, KEEP)
    return asks


@triton.jit(do_not_specialize=["num_ahead", "num_askers"])
def ask_kernel(ahead, num_ahead, num_askers, BULK: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr):
    """Asks for the first bytes of a weight. Program (asker). Touches nothing that another kernel writes."""
    ask_for(ahead, num_ahead, tl.program_id(0), num_askers, BULK, KEEP)
    # behind all that was launched before, so that who waits for this waits for that
    take_turn(EARLY)


def asks(ask: Ask | None, like: Tensor, across: int = 1) -> dict[str, Any]:
    """Arguments of a kernel some of whose programs ask: as many more on axis 0, which has `across` of axis 1 each."""
    if ask is None:
        return {"ahead": like, "num_ahead": 0, "num_askers": 0, "ASKS": False, "BULK": False, "KEEP": False}
    (weight, num_bytes, how), programs = ask, triton.cdiv(ask.how.programs, across)
    constants = {"ASKS": True, "BULK": how.bulk, "KEEP": how.keep}
    return {"ahead": weight, "num_ahead": num_bytes, "num_askers": programs} | constants


class WeightsAhead:
    """Learns the order of products, and asks for their weights where a graph is recorded."""

    def __init__(self) -> None:
        self.order: list[Tensor | None] = []  # the weights of products; None: of one that cannot be asked for
        self.recorded = 0  # products so far
        self.learns = self.records = self.forked = False
        self.ask: Ask | None = None  # for the kernel that is launched next
        self.launched: set[Asking] = set()
        self.stream: torch.cuda.Stream | None = None

    @contextmanager
    def learning(self) -> Iterator[None]:
        """What runs inside calls products in the order in which they are recorded next."""
        self.order, self.learns = [], True
        try:
            yield
        finally:
            self.learns, self.ask = False, None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What runs inside is recorded, and asks. At its end it waits for what was launched beside."""
        self.recorded, self.records = 0, True
        try:
            yield
            if self.forked:
                assert self.stream
                torch.cuda.current_stream().wait_stream(self.stream)
        finally:
            self.records = self.forked = False
            self.order, self.ask = [], None

    def behind(self, x: Tensor, weight: Any, known: bool = True) -> None:
        """The product of x with this weight was launched. `known`: which part of it is read."""
        own, self.ask = weight if known else None, None
        if self.learns:
            self.order.append(own)
        following = self._next(own) if self.records else weight
        how = asking_of(len(x), x.device)
        if how is not None and following is not None and following.is_contiguous():
            # op by op, only what a recording launches is compiled
            num_bytes = min(how.most_bytes, following.nbytes) // 16 * 16 if self.records else 0
            self._put(Ask(following.view(-1).view(torch.uint8), num_bytes, how))

    def _next(self, own: Tensor | None) -> Tensor | None:
        """The weight behind that of the product that is recorded now."""
        assert self.order[self.recorded] is own, "a recording differs from the run before it"
        self.recorded += 1
        return self.order[self.recorded] if self.recorded < len(self.order) else None

    def take(self) -> Ask | None:
        """What is to be asked for by the kernel that is launched next; once."""
        ask, self.ask = self.ask, None
        return ask

    def _put(self, ask: Ask) -> None:
        place = ask.how.place
        if place == "within":
            self.ask = ask
        elif self.records and place == "beside":
            assert self.stream
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                launch(ask, False)
            self.forked = True
        elif self.records or ask.how not in self.launched:
            launch(ask, place == "between")
        if self.learns and ask.how not in self.launched:
            # nothing may be loaded, and no stream made, while a graph is recorded
            self.launched.add(ask.how)
            self.stream = self.stream or (torch.cuda.Stream(ask.weight.device) if place == "beside" else None)


def launch(ask: Ask, in_turn: bool) -> None:
    """Programs that do nothing else; `in_turn`: between two kernels."""
    (weight, num_bytes, how), turns = ask, {"EARLY": False}
    if in_turn:
        turns = early(weight.device, how.programs)
    ask_kernel[(how.programs,)](
        weight, num_bytes, how.programs, BULK=how.bulk, KEEP=how.keep, **turns, num_warps=1 if how.bulk else 4
    )
