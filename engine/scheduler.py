"""Decides what runs next. A state machine of plain Python: no arrays, no device, no clock, no randomness.

It may plan while the tokens of earlier steps are unknown: a request then has `in_flight` tokens, which count as tokens
but have no value here. Their values reach the next step on the device, in rows["tokens"].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from ..models.sampling import VARIANTS
from .block_manager import BlockManager
from .draft import Draft, admission
from .limits import Limits, SchedulerConfig, busy_step, check_length, check_room, longest
from .plan import Chunk, Plan, Reason, TableWrite, Transfer, retell
from .policy import as_policy
from .preemption import warn
from .reads import complete_of, plan_reads
from .repetition import STOP_REASON, goes_round
from .request import Request
from .scheduler_state import dump_state, load_state
from .siblings import Estates, first_will_compute
from .waiting import WaitingQueue


class Scheduler:
    """Call schedule, launch what it returns, and hand the tokens to update, in the order of the plans.

    schedule may be called again before update: None then means that nothing can go on until a result is read.
    With several `batches`, a request whose token is unread is in no plan, and a plan has its share of them alone, those
    first that have waited longest: so there is work for so many stages at a time.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, policy: Any = None):
        """`policy` takes the place of the config's: a name, or an object as policy.as_policy describes."""
        if blocks.max_num_batched_tokens != config.max_num_batched_tokens:
            raise ValueError(
                f"blocks are counted for {blocks.max_num_batched_tokens} tokens a step, not for "
                f"max_num_batched_tokens {config.max_num_batched_tokens}"
            )
        self.config, self.blocks, self.limits = config, blocks, Limits.of(config)
        self.policy = as_policy(config.policy if policy is None else policy)
        blocks.set_evict(self.policy.evict)
        self.spare_blocks = int(config.watermark * min(blocks.num_blocks))
        self.events: list[tuple[str, Reason]] = []  # reasons that the next plan reports
        self.step = self.first_step = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # computed, after a preemption again; hits are not
        self.held = 0  # steps since prompts began to wait for more of them
        self.num_queried_tokens = self.num_hit_tokens = 0  # of the prefix cache, at first admissions
        self._clear()

    def _clear(self) -> None:
        self.free_rows = list(range(self.config.max_num_seqs - 1, -1, -1))
        self.alive: dict[str, Request] = {}
        self.running: dict[Request, None] = {}  # in order of admission
        self.ending: dict[Request, None] = {}  # running ones of which all is planned, in the order of their last chunks
        self.left: set[Request] = set()  # those that have given up their seats, and are still to be read
        self.waiting: WaitingQueue = self.policy.queue()
        # tokens in flight of requests that have ended, by id: they are dropped when read
        self.orphans: dict[str, int] = {}
        # blocks of which the device chooses what stays are nobody else's
        self.estates = Estates(forks=self.blocks.cuts is None and self.blocks.layout_keeps.forks)

    @property
    def has_work(self) -> bool:
        return bool(self.alive)

    @property
    def num_running(self) -> int:
        """Requests that have a seat, or have given it up and are still to be read."""
        return len(self.running) + len(self.left)

    def check(self, r: Request) -> None:
        """Raises ValueError for a request that can never be served. Changes nothing."""
        check_length(r, self.config.max_model_len)
        check_room(r, self.config.max_model_len, self.blocks)

    def add(self, r: Request) -> None:
        """Queues a request. Raises ValueError if it can never be served or its id is in use."""
        if r.id in self.alive:
            raise ValueError(f"request id {r.id!r} is in use")
        self.check(r)
        r.limit, r.first_step = longest(r, self.config.max_model_len), self.step
        r.variant, r.num_logprobs = VARIANTS.index(r.params.variant), r.params.num_logprobs
        # a user's rank may raise: it is then not in
        self.waiting.push(r)
        self.alive[r.id] = r
        self.estates.expect(r)

    def compiled(self, r: Request) -> None:
        """Lets a request start whose grammar has been compiled."""
        r.compiling = False

    def schedule(self) -> Plan | None:
        """The next step, or None if nothing can run now. What it plans counts as computed from now on."""
        ended = self._free_seats()
        draft = Draft(self._budget(), reasons=ended)
        if self.config.order == "decode_first":
            self._continue(draft, list(self.running))
            self._commit_planned(draft)
            self._admit_waiting(draft, 0)
        else:
            prefills = [r for r in self.running if r.num_wanted > 1]
            decodes = [r for r in self.running if r.num_wanted == 1]
            self._continue(draft, prefills)
            self._admit_waiting(draft, self._blocks_wanted(decodes))
            self._continue(draft, decodes)
            self._commit_planned(draft)
        self.estates.settle(self.blocks)
        return self._plan(draft)

    def update(self, plan: Plan, token_ids: Sequence[int]) -> list[Request]:
        """Takes in what a step sampled, one token a sampled chunk; returns the requests that got one, in that order.

        Behind them come those that were computed only, and end here. Tokens of requests that have ended are dropped.
        Plans must come in the order in which they were made.
        """
        if plan.step < self.first_step:
            raise ValueError(f"plan {plan.step} was abandoned; plans from {self.first_step} on can be read")
        touched, alive, blocks, size = [], self.alive, self.blocks, self.blocks.block_size
        for chunk, token in zip(plan.sampled, token_ids, strict=True):
            if self.orphans and self._drops(chunk.request_id):
                continue
            r = alive[chunk.request_id]
            r.in_flight -= 1
            tokens = r.tokens
            tokens.append(token)
            touched.append(r)
            known = len(tokens)
            if known >= r.limit or token in r.stops:
                self._stop(r, token)
            elif r.may_go_round and goes_round(r):
                self._end(r, Reason.REPETITION, STOP_REASON)
            elif known >= (full := (r.registered + 1) * size) and r.computed >= full:
                blocks.register(r)
        complete = complete_of(self, plan) if plan.ended else []
        for r in complete:
            self._end(r, Reason.STOP)
        return touched + complete

    def finish(self, r: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request that is alive, running or waiting, for a Reason that is an end; or says why it did just now.

        A step in flight may still write its row and blocks: harmless, because whoever gets them next writes in a later
        step, and reads nothing that it has not written or been given.
        """
        if r.finish_reason is None:
            self._free_seats()
            self._end(r, reason, stop_reason)
        else:
            r.finish_reason, r.stop_reason = retell(self.events, r.id, Reason(reason)), stop_reason

    def _end(self, r: Request, reason: str, stop_reason: int | str | None = None) -> None:
        self.events.append((r.id, Reason(reason)))
        r.finish_reason, r.stop_reason = str(reason), stop_reason
        del self.alive[r.id]
        if r.in_flight:
            self.orphans[r.id] = self.orphans.get(r.id, 0) + r.in_flight
            r.in_flight = 0
        if r.row is not None:
            self._leave(r, keep=self.estates.keeps(r))
        elif r in self.left:
            self.left.remove(r)
        else:
            self.waiting.remove(r)
            self.estates.served(r, self.blocks)

    def set_limits(self, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None) -> None:
        """Changes what is not None, from the next step on, and preempts whoever is now too many.

        Raises ValueError for more than the config has, which is what the programs were made for.
        """
        self.limits = self.limits.changed(self.config, max_num_seqs, max_num_batched_tokens)
        self._free_seats()
        while len(self.running) > self.limits.max_num_seqs:
            self._preempt(self.policy.victim(self.running), Draft(0))

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while requests are running."""
        self.estates.settle(self.blocks)
        return self.blocks.reset()

    def abandon(self) -> None:
        """Ends all requests with "error", voids all that is in flight, and empties the prefix cache.

        For a failed step: blocks count as computed once they are scheduled, so none of them is to be trusted. It may
        have been interrupted anywhere, in here too, so everything starts anew, whatever it looks like.
        """
        for r in self.alive.values():
            self.events.append((r.id, Reason.ERROR))
            r.finish_reason, r.in_flight, r.row, r.blocks = str(Reason.ERROR), 0, None, []
        self.first_step = self.step
        self.blocks.clear()
        self._clear()

    def dump(self) -> dict[str, Any]:
        """The whole state, requests included, as a JSON-able value."""
        return dump_state(self)

    @staticmethod
    def load(value: dict[str, Any], policy: Any = None) -> Scheduler:
        """The scheduler that was dumped: equal events lead to equal plans. Its requests are new objects, in `alive`.

        A policy from FILE.py:NAME is loaded again; of another of one's own the dump has the name alone, and it is to be
        given again. Raises ValueError for one of another name.
        """
        s = Scheduler(SchedulerConfig(**value["config"]), BlockManager.load(value["blocks"]), policy)
        load_state(s, value)
        return s

    def _stop(self, r: Request, token: int) -> None:
        if token in r.eos_ids:
            self._end(r, Reason.STOP)
        elif token in r.params.stop_token_ids:
            self._end(r, Reason.STOP, token)
        else:
            self._end(r, Reason.LENGTH)

    def _drops(self, request_id: str) -> bool:
        """Whether a token was made for a request that has ended. They come before those of a new one of the same id."""
        if (left := self.orphans.pop(request_id, 0)) > 1:
            self.orphans[request_id] = left - 1
        return left > 0

    def _free_seats(self) -> list[tuple[str, Reason]]:
        """Takes row and blocks of those that end whatever their last token is, and have no other token unread.

        In a synchronous run they have ended by now, so both kinds of run plan the same. A step in flight may still use
        both: harmless, as with `finish`. All that is computed is known, so the prefix cache has it.
        """
        done = [r for r in self.ending if r.complete or r.in_flight == 1]
        for r in done:
            self._leave(r, keep=self.estates.keeps(r))
        self.left.update(done)
        return [(r.id, Reason.ENDS_UNREAD) for r in done]

    def _continue(self, draft: Draft, requests: Iterable[Request]) -> None:
        """Plans the next tokens of running requests, in this order."""
        size, forgets, cuts = self.blocks.block_size, self.blocks.forgets, self.blocks.cuts
        most, several = self._share(len(self.running)), self.config.batches > 1
        for r in sorted(requests, key=lambda r: r.last_step) if several else requests:
            if r.row is None:
                continue
            num_tokens = len(r.tokens) + r.in_flight
            if r in self.ending:
                draft.reasons.append((r.id, Reason.ENDS_UNREAD))
                continue
            if several and (r.in_flight or draft.num_taken >= most):
                draft.reasons.append((r.id, Reason.IN_FLIGHT if r.in_flight else Reason.NEXT_BATCH))
                continue
            if not draft.budget:
                draft.reasons.append((r.id, Reason.NO_BUDGET))
                continue
            n = num_tokens - r.computed
            if n > 1:
                n = min(self._capped(r, n, draft), draft.budget)
                n = n if cuts is None else min(n, cuts.chunk(r.computed, len(r.prompt)) or n)
            if (forgets or r.computed + n > len(r.blocks[0]) * size) and not self._make_room(r, n, draft):
                continue
            draft.planned[r] = n
            draft.budget -= n

    def _make_room(self, r: Request, n: int, draft: Draft) -> bool:
        """Reserves blocks for n more tokens, preempting others for them; False if the request itself had to go."""
        writes = draft.writes.setdefault(r, [])
        while not self.blocks.reserve(r, r.computed + n, writes):
            if self.estates.settle(self.blocks):
                continue
            last = self.policy.victim(self.running)
            self._preempt(last, draft)
            warn(last, self.num_preemptions)
            if last is r:
                return False
        return True

    def _preempt(self, r: Request, draft: Draft) -> None:
        """Takes a running request's row and blocks, and what this step has planned for it. Its tokens stay."""
        draft.budget += draft.planned.pop(r, 0)
        draft.writes.pop(r, None)
        draft.preempted = True
        self._leave(r)
        self.waiting.give_back([r])
        self.events.append((r.id, Reason.PREEMPTED))
        r.preemptions += 1
        self.num_preemptions += 1

    def _leave(self, r: Request, keep: bool = False) -> None:
        assert r.row is not None
        del self.running[r]
        self.ending.pop(r, None)
        self.free_rows.append(r.row)
        if not keep:
            self.blocks.release(r)
        r.row = None

    def _admit_waiting(self, draft: Draft, spare: int) -> None:
        """Starts waiting requests from the head, until one cannot start. `spare` blocks are to be left."""
        aside: list[Request] = []
        families: set[Request | None] = set()  # whose prompt nobody has computed yet
        while self.waiting:
            r = self.waiting.head()
            code = self._closed(draft)
            if code is None and (why := self._set_aside(r, families, draft)):
                draft.reasons.append((r.id, why))
                self.waiting.remove(r)
                aside.append(r)
                continue
            code = code or self._admit(r, draft, spare)
            if code:
                draft.reasons.append((r.id, code))
                break
        self.waiting.give_back(aside)

    def _set_aside(self, r: Request, families: set[Request | None], draft: Draft) -> Reason | None:
        """Why this one must wait whatever room there is, and those behind it need not."""
        if r.in_flight or r.complete:
            return Reason.IN_FLIGHT
        if r.compiling:
            return Reason.GRAMMAR
        if not self.estates.may_fork(r) or r.first in self.left or not first_will_compute(r, draft):
            return None
        if r.first not in families and self.estates.fork(r, self.running, draft, self.blocks):
            return None
        families.add(r.first)
        return Reason.SIBLING

    def _closed(self, draft: Draft) -> Reason | None:
        """Why nobody can be admitted, whoever it is: the queue is then not even looked at."""
        if draft.preempted:
            return Reason.AFTER_PREEMPTION
        if len(self.running) >= self.limits.max_num_seqs:
            return Reason.NO_SEAT
        everybody = len(self.alive) - len(self.left)
        if draft.num_taken >= self._share(min(everybody, self.limits.max_num_seqs)):
            return Reason.NEXT_BATCH
        return None if draft.budget else Reason.NO_BUDGET

    def _admit(self, r: Request, draft: Draft, spare: int) -> Reason | None:
        """Moves the head of the queue to running and commits its first chunk, or returns why not."""
        forked = self.estates.fork(r, self.running, draft, self.blocks)
        hit = forked or self.blocks.lookup(r)
        n = self._capped(r, len(r.tokens) - hit.length, draft)
        if n > draft.budget and not self.config.enable_chunked_prefill:
            return Reason.NO_BUDGET
        n = min(n, draft.budget)
        if self.blocks.cuts:
            n = min(n, self.blocks.cuts.chunk(0, len(r.prompt)) or n)
        if not self.blocks.admit(r, hit, hit.length + n, spare + (self.spare_blocks if self.running else 0)):
            return self._admit(r, draft, spare) if self.estates.settle(self.blocks) else Reason.NO_ROOM
        self.waiting.remove(r)
        self.estates.served(r, self.blocks)
        self.running[r] = None
        r.row = self.free_rows.pop()
        if r.num_cached is None:
            r.num_cached = hit.length
            self.num_queried_tokens += len(r.tokens)
            self.num_hit_tokens += hit.length
        started = Reason.RESUMED if r.preemptions else Reason.FORKED if forked else Reason.ADMITTED
        draft.reasons.append((r.id, started))
        draft.admitted.append(admission(r))
        draft.writes[r] = [TableWrite(g, r.row, 0, tuple(table)) for g, table in enumerate(r.blocks)]
        draft.transfers += [Transfer(g, source, r.blocks[g][index]) for g, source, index in hit.copies]
        draft.budget -= n
        self._commit({r: n}, draft)
        # what it hit too may be computed in this very step
        draft.committed[r] = r.computed
        return None

    def _commit_planned(self, draft: Draft) -> None:
        # only now that nobody can be preempted any more: a victim's blocks would be hit although its step never runs
        if self.config.batches > 1:
            for r in draft.planned:
                assert r.row is not None
                if len(r.prompt) <= r.computed == len(r.tokens) - 1:
                    draft.tokens.append((r.row, r.computed, r.tokens[-1]))
        self._commit(draft.planned, draft)
        draft.committed |= draft.planned
        draft.planned = {}

    def _commit(self, planned: dict[Request, int], draft: Draft) -> None:
        """Counts what is planned as computed. The hottest loop of a step: it calls nothing that it need not."""
        chunks, blocks, size, cuts = draft.chunks, self.blocks, self.blocks.block_size, self.blocks.cuts
        # what a NamedTuple's constructor comes down to
        step, new_chunk = self.step, tuple.__new__
        for r, n in planned.items():
            start, known, row = r.computed, len(r.tokens), r.row
            r.computed = end = start + n
            r.last_step = step
            samples = end == known + r.in_flight and r.samples
            if cuts is not None and cuts.left(end, len(r.prompt)) < cuts.slots(end, len(r.prompt)):
                draft.cuts = True
            assert row is not None
            chunks.append(new_chunk(Chunk, (r.id, row, start, n, samples)))
            if samples:
                r.in_flight += 1
                if end + 1 == r.limit:
                    self.ending[r] = None
                if r.variant > draft.variant:
                    draft.variant = r.variant
                if r.num_logprobs > draft.num_logprobs:
                    draft.num_logprobs = r.num_logprobs
                if r.params.logprob_token_ids:
                    draft.token_ids[r.id] = tuple(r.params.logprob_token_ids)
            if r.wanted or not r.samples:
                plan_reads(r, start, draft)
            if start < len(r.prompt):
                self.num_prompt_tokens += min(end, len(r.prompt)) - start
            if end >= (full := (r.registered + 1) * size) and known >= full:
                blocks.register(r)

    def _plan(self, draft: Draft) -> Plan | None:
        if not draft.chunks:
            return None
        self.ending |= dict.fromkeys(self.alive[name] for name in draft.ended)
        plan = draft.plan(self.step, self.events)
        self.step, self.events = self.step + 1, []
        return plan

    def _budget(self) -> int:
        """Tokens of a step. Where somebody has to wait for a seat anyway, steps are made full."""
        seats, most = self.limits.max_num_seqs - len(self.running), self.limits.max_num_batched_tokens
        held, self.held = self.held, 0
        if not self.config.cuts or len(self.waiting) <= seats:
            return most
        theirs = sum(len(r.tokens) for r in islice(self.waiting, seats))
        budget, self.held = busy_step(self.config, most, [r.num_wanted for r in self.running], theirs, held)
        return budget

    def _share(self, num_requests: int) -> int:
        """How many of them a batch has."""
        return -(-num_requests // self.config.batches)

    def _blocks_wanted(self, decodes: Iterable[Request]) -> int:
        """Blocks of each group that these running requests need for their next token: newcomers must leave them."""
        still = [r for r in decodes if r.row is not None and r not in self.ending]
        return sum(self.blocks.missing(r, r.computed + 1) for r in still)

    def _capped(self, r: Request, n: int, draft: Draft) -> int:
        """n, or the long-prefill threshold if somebody else could use the budget."""
        threshold = self.config.long_prefill_token_threshold
        if not threshold or n <= threshold:
            return n
        running = any(x is not r and (x in draft.committed or x not in self.ending) for x in self.running)
        # a step that preempts admits nobody
        waiting = () if draft.preempted else self.waiting
        rival = running or any(x is not r and not self._set_aside(x, set(), draft) for x in waiting)
        return threshold if rival else n
