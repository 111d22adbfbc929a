"""The scheduling rules once more, as plainly as possible: one full-attention group, no families, nothing fast.

Written from semantics 2.2 to 2.6, not from engine/scheduler.py, of which it imports nothing. Queues are lists, the free
queue is a list, and a block's key is all that precedes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil


@dataclass(eq=False)
class Req:
    id: str
    prompt: list[int]
    limit: int
    stops: set[int]
    priority: int
    arrival: int
    salt: str | None
    out: list[int] = field(default_factory=list)
    unread: int = 0
    computed: int = 0
    last: int = -1  # the step that went on with it
    blocks: list[int] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.prompt + self.out

    @property
    def total(self) -> int:
        return len(self.prompt) + len(self.out) + self.unread


class Oracle:
    def __init__(self, config, num_blocks, block_size, caching):
        self.c, self.size, self.caching, self.num_blocks = config, block_size, caching, num_blocks
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.cached: list[tuple[object, int]] = []  # (key, block) in order of registration
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.ending: list[Req] = []  # running ones of which all is planned, in the order of their last chunks
        self.preempted = self.step = self.held = 0

    def add(self, r):
        self.waiting.append(r)
        self.sort()

    def sort(self):
        if self.c.policy == "priority":
            self.waiting.sort(key=lambda r: (r.priority, r.arrival))

    def schedule(self):
        """[(id, first token, number of tokens, samples)] of the step, and who was admitted with how many cached."""
        done = self.decide()
        self.step += bool(done)
        return done

    def decide(self):
        self.free_seats()
        self.budget, self.plan, self.admitted, self.victims = self.room(), {}, [], 0
        long = [r for r in self.running if r.total - r.computed > 1]
        if self.c.order == "decode_first":
            self.run(list(self.running))
            done = self.count(list(self.plan))
            self.admit(0)
            return done + self.count([r for r in self.plan if r.id not in {d[0] for d in done}])
        short = [r for r in self.running if r not in long]
        self.run(long)
        before = list(self.plan)
        wish = [r for r in short if r in self.running and not self.surely_ends(r)]
        self.admit(sum(ceil((r.computed + 1) / self.size) - len(r.blocks) for r in wish))
        new = self.count([r for r in self.plan if r not in before])
        self.run(short)
        return new + self.count([r for r in self.plan if r.id not in {d[0] for d in new}])

    def room(self):
        """Tokens of the step: a full one where somebody has to wait for a seat, and prompts get a quarter of theirs."""
        held, self.held = self.held, 0
        seats = self.c.max_num_seqs - len(self.running)
        if not self.c.enable_chunked_prefill or self.c.batches > 1 or len(self.waiting) <= seats:
            return self.c.max_num_batched_tokens
        wants = [r.total - r.computed for r in self.running] + [len(r.known) for r in self.waiting[:seats]]
        prompts = sum(n for n in wants[len(self.running) :]) + sum(n for n in wants[: len(self.running)] if n > 1)
        others = sum(wants) - prompts
        going = [n == 1 for n in wants[: len(self.running)]]
        if others and (self.c.order == "prefill_first" or going != sorted(going, reverse=True)):
            return self.c.max_num_batched_tokens
        if prompts and others and sum(wants) < min(self.c.full, default=0) and held < 3:
            self.held = held + 1
            return others
        fits = [n for n in self.c.full if n <= self.c.max_num_batched_tokens and n <= sum(wants)]
        fits = [n for n in fits if n - others >= max(1, prompts // 4)]
        return max(fits, default=self.c.max_num_batched_tokens)

    def run(self, requests):
        several, most = self.c.batches > 1, ceil(len(self.running) / self.c.batches)
        if several:
            requests = sorted(requests, key=lambda r: r.last)
        for r in requests:
            if r not in self.running or self.surely_ends(r) or self.budget == 0:
                continue
            if several and (r.unread or len(self.plan) >= most):
                continue
            n = min(self.threshold(r, r.total - r.computed), self.budget)
            need = ceil((r.computed + n) / self.size) - len(r.blocks)
            while need > len(self.free) and r in self.running:
                victim = self.running[-1]
                if self.c.policy == "priority":
                    victim = max(self.running, key=lambda x: (x.priority, x.arrival))
                self.budget += self.plan.pop(victim, 0)
                self.drop(victim)
                self.waiting.insert(0, victim)
                self.sort()
                self.victims += 1
                self.preempted += 1
            if r in self.running:
                r.blocks += [self.pop() for _ in range(need)]
                self.plan[r] = n
                self.budget -= n

    def admit(self, spare):
        aside = []
        while self.waiting and self.budget and len(self.running) < self.c.max_num_seqs and not self.victims:
            r = self.waiting[0]
            everybody = len(self.running) + len(self.waiting) + len(aside)
            if len(self.plan) >= ceil(min(everybody, self.c.max_num_seqs) / self.c.batches):
                break
            if r.unread:
                aside.append(self.waiting.pop(0))
                continue
            hit = self.lookup(r)
            n = self.threshold(r, len(r.known) - len(hit) * self.size)
            if n > self.budget and not self.c.enable_chunked_prefill:
                break
            n = min(n, self.budget)
            left = spare + (int(self.c.watermark * self.num_blocks) if self.running else 0)
            fresh = len([b for b in self.free if b not in hit])
            if ceil(len(r.known) / self.size) - len(hit) + left > fresh:
                break
            for b in hit:
                self.refs[b] += 1
                if b in self.free:
                    self.free.remove(b)
            r.computed = len(hit) * self.size
            r.blocks = hit + [self.pop() for _ in range(ceil((r.computed + n) / self.size) - len(hit))]
            self.running.append(self.waiting.pop(0))
            self.admitted.append((r.id, r.computed))
            self.plan[r] = n
            self.budget -= n
            self.register(r, r.computed + n)
        self.waiting = aside + self.waiting
        self.sort()

    def count(self, requests):
        done = []
        for r in requests:
            n = self.plan[r]
            done.append((r.id, r.computed, n, r.computed + n == r.total))
            r.computed += n
            r.unread += done[-1][3]
            r.last = self.step
            self.register(r, r.computed)
            if self.surely_ends(r):
                self.ending.append(r)
        return done

    def update(self, sampled):
        """sampled: (request, token) of the oldest step; requests that have ended meanwhile are not in it."""
        for r, token in sampled:
            r.unread -= 1
            r.out.append(token)
            if token in r.stops or len(r.known) >= r.limit:
                self.end(r)
            elif r in self.running:
                self.register(r, r.computed)

    def abort(self, r):
        self.free_seats()
        self.end(r)

    def free_seats(self):
        for r in [r for r in self.ending if r.unread == 1]:
            self.drop(r)

    def end(self, r):
        if r in self.running:
            self.drop(r)
        elif r in self.waiting:
            self.waiting.remove(r)

    def drop(self, r):
        for b in reversed(r.blocks):
            self.refs[b] -= 1
            if self.refs[b] == 0:
                self.free.insert(len(self.free) if b in [x for _, x in self.cached] else 0, b)
        r.blocks, r.computed = [], 0
        self.running.remove(r)
        self.ending = [x for x in self.ending if x is not r]

    def pop(self):
        block = self.free.pop(0)
        self.cached = [(k, b) for k, b in self.cached if b != block]
        self.refs[block] = 1
        return block

    def keys(self, r):
        return [(r.salt, tuple(r.known[: i + self.size])) for i in range(0, len(r.known) - self.size + 1, self.size)]

    def register(self, r, computed):
        if self.caching:
            for key, b in list(zip(self.keys(r), r.blocks))[: computed // self.size]:
                if b not in [x for _, x in self.cached]:
                    self.cached.append((key, b))

    def lookup(self, r):
        hit = []
        for key in self.keys(r)[: (len(r.known) - 1) // self.size]:
            found = [b for k, b in self.cached if k == key]
            if not found:
                break
            hit.append(found[0])
        return hit

    def surely_ends(self, r):
        return r.unread > 0 and r.total >= r.limit

    def threshold(self, r, n):
        cap = self.c.long_prefill_token_threshold
        others = [x for x in self.running if x in self.plan or not self.surely_ends(x)]
        others += [x for x in self.waiting if not x.unread and not self.victims]
        return min(n, cap) if cap and [x for x in others if x is not r] else n
