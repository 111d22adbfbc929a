"""Scheduling policies: a user's rank and eviction are what the scheduler does."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from backends import BACKENDS
from scheduler_world import add, make_request, planned
from tiny import GREEDY, PROMPTS, TINY, engine, numpy_weights, spec_of, tokens

from octavo.engine.block_manager import BlockManager
from octavo.engine.lab.replaying import replay
from octavo.engine.lab.rerun import rerun
from octavo.engine.lab.simulate import Arrival, Cost, Simulation, make_scheduler
from octavo.engine.limits import SchedulerConfig
from octavo.engine.policy import as_policy
from octavo.engine.scheduler import Scheduler
from octavo.engine.user_code import function_in_file, load_object

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}


class ShortestFirst:
    def rank(self, request):
        return len(request.prompt)


class NewestFirst:
    """Of the blocks whose content is cached, forgets what was freed last: the opposite of the default."""

    def evict(self, pool):
        return next((b for b in pool.free if b not in pool.key_of), next(reversed(pool.free)))


def scheduler(policy, max_num_seqs=1, num_blocks=50):
    blocks = BlockManager([None], [num_blocks], 4, True, 64)
    return Scheduler(SchedulerConfig(max_num_seqs, 64, 64), blocks, policy)


def test_the_smallest_rank_starts_first():
    s = scheduler(ShortestFirst(), max_num_seqs=2)
    add(s, *(make_request(str(n), range(n)) for n in (9, 3, 6)))
    assert [c.request_id for c in planned(s).chunks] == ["3", "6"]


def test_equal_ranks_keep_their_order_also_after_a_preemption():
    s = scheduler(ShortestFirst(), max_num_seqs=3)
    add(s, *(make_request(f"{name}", range(5)) for name in "abc"))
    assert [c.request_id for c in planned(s).chunks] == ["a", "b", "c"]
    s.set_limits(max_num_seqs=1)
    assert [r.id for r in s.waiting] == ["b", "c"]


def test_the_greatest_rank_is_preempted():
    s = scheduler(ShortestFirst(), max_num_seqs=3)
    add(s, *(make_request(str(n), range(n)) for n in (5, 8, 3)))
    planned(s)
    s.set_limits(max_num_seqs=2)
    assert [r.id for r in s.waiting] == ["8"]


def test_the_block_that_a_policy_names_is_used_next():
    """Two cached prompts, then room is needed: the default forgets the older one, this policy the newer one."""
    hits = {}
    for policy in ("fcfs", NewestFirst()):
        s = scheduler(policy, num_blocks=7)
        for name, prompt in (("old", [1] * 12), ("new", [2] * 12), ("other", [3] * 12), ("again", [1] * 12)):
            (r,) = add(s, make_request(name, prompt, max_tokens=1))
            s.update(planned(s), [0])
            hits[name, str(policy)] = r.num_cached
        hits[type(policy).__name__] = hits["again", str(policy)]
    assert hits["str"] == 0 and hits["NewestFirst"] == 8


@pytest.mark.parametrize("block", [None, 0, -1, 99, "a", float("nan"), 1.0])
def test_a_block_that_is_not_free_is_refused(block):
    s = scheduler(SimpleNamespace(evict=lambda pool: block))
    add(s, make_request("one", [1] * 12, max_tokens=1))
    with pytest.raises(ValueError, match="is not free"):
        s.schedule()


def test_every_request_is_served_under_any_rank():
    rng = random.Random(2)
    arrivals = [Arrival(i * 0.05, rng.randint(1, 80), rng.randint(1, 20), n=rng.choice([1, 2])) for i in range(150)]

    class Odd:
        def rank(self, request):
            return hash((len(request.prompt), request.arrival)) % 7

        def evict(self, pool):
            return max(pool.free)

    report = Simulation(make_scheduler(14, policy=Odd(), **LIMITS), Cost(0.1, 0, 0, 0)).run(arrivals)
    assert report.num_requests == sum(a.n for a in arrivals)
    assert report.num_tokens == sum(a.n * a.output for a in arrivals)
    assert report.num_preemptions > 0


def test_shortest_first_answers_short_ones_sooner():
    rng = random.Random(4)
    arrivals = [Arrival(0.0, rng.choice([8, 200]), 8) for _ in range(60)]
    found = [
        Simulation(make_scheduler(100, policy=p, **LIMITS), Cost(0.1, 0, 0, 0)).run(arrivals)
        for p in ("fcfs", ShortestFirst())
    ]
    fcfs, short = (f.ttft.quantile(0.4) for f in found)
    assert short < 0.8 * fcfs


def test_what_is_no_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'lifo' is none of fcfs, priority"):
        as_policy("lifo")
    with pytest.raises(ValueError, match="neither rank"):
        as_policy(3)
    (tmp_path / "number.py").write_text("N = 3\n")
    with pytest.raises(ValueError, match="N' is 3: a function is right"):
        function_in_file(f"{tmp_path}/number.py:N")
    with pytest.raises(ValueError, match="is a class: an object of it is right"):
        as_policy(ShortestFirst)
    for method in ("rank", "evict"):
        with pytest.raises(ValueError, match=f"{method} 3 is no method"):
            as_policy(SimpleNamespace(**{method: 3}))
    (tmp_path / "mine.py").write_text("class Mine:\n    def rank(self, r):\n        return 0\n")
    assert as_policy(load_object(f"{tmp_path}/mine.py:Mine")).name == "Mine"
    for where, message in (("mine.py", "is not FILE.py:NAME"), (f"{tmp_path}/no.py:A", "there is no file"),
                           (f"{tmp_path}/mine.py:Yours", "has no Yours")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            load_object(where)


def test_a_request_that_has_no_rank_is_not_taken_in():
    class Picky:
        def rank(self, request):
            return 1 // (len(request.prompt) - 3)

    s = scheduler(Picky())
    with pytest.raises(ZeroDivisionError):
        s.add(make_request("three", range(3)))
    assert not s.has_work and len(s.waiting) == 0
    add(s, make_request("three", range(5)))
    assert [c.request_id for c in planned(s).chunks] == ["three"]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([None], r"policy 'Odd': request 'r0' has rank None, which has no order: numbers"),
        ([1, "a"], r"policy 'Odd': request 'r1' has rank 'a', which has no order beside 1"),
        ([(0, 1), (0, "a")], r"request 'r1' has rank \(0, 'a'\), which has no order beside \(0, 1\)"),
    ],
)
def test_a_rank_that_has_no_order_is_named(ranks, message):
    """Also beside one that runs by now, and may have to be preempted for it."""

    class Odd:
        def rank(self, request):
            return ranks[int(request.id[1:])]

    s = scheduler(Odd())
    with pytest.raises(ValueError, match=message):
        for i in range(len(ranks)):
            s.add(make_request(f"r{i}", range(5)))
            planned(s)
    assert len(s.waiting) == 0 and len(s.alive) == len(ranks) - 1


def test_a_dump_wants_its_policy_back():
    s = scheduler(ShortestFirst(), max_num_seqs=1)
    add(s, *(make_request(str(n), range(n)) for n in (9, 3, 6)))
    with pytest.raises(ValueError, match="is of policy 'ShortestFirst'"):
        Scheduler.load(s.dump())
    assert planned(Scheduler.load(s.dump(), ShortestFirst())) == planned(s)


FROM_FILE = """
class ShortestFirst:
    def rank(self, request):
        return len(request.prompt)
"""


def test_an_engine_takes_a_policy_by_file_or_by_value(tmp_path):
    """What `simulate --policy` tries runs in production: the longest prompt waits though it came first."""
    (tmp_path / "mine.py").write_text(FROM_FILE)
    named = f"{tmp_path / 'mine.py'}:ShortestFirst"
    want = tokens(engine(backend=BACKENDS[0]), PROMPTS[2:5])
    for policy in (named, ShortestFirst()):
        llm = engine(backend=BACKENDS[0], scheduling_policy=policy, max_num_seqs=1)
        assert llm.scheduler.policy.name == "ShortestFirst"
        order = []
        for i in (3, 0, 1):
            llm.add_request(str(i), PROMPTS[i], GREEDY, priority=i)
        while llm.has_unfinished_requests():
            order += [o.request_id for o in llm.step() if o.finished]
        assert order == ["1", "0", "3"]
        assert tokens(llm, PROMPTS[2:5]) == want


def test_an_engine_with_an_eviction_policy():
    """NewestFirst forgets the prompt that was cached last, so that the older one is hit."""
    hits = []
    for policy in ("fcfs", NewestFirst()):
        llm = engine(backend=BACKENDS[0], scheduling_policy=policy, num_gpu_blocks_override=12, max_model_len=80)
        one = GREEDY.clone(max_tokens=1)
        for prompt in ([1] * 44, [2] * 40, [3] * 40):
            llm.generate(prompt, one, use_tqdm=False)
        (output,) = llm.generate([1] * 44, one, use_tqdm=False)
        hits.append(output.num_cached_tokens)
    assert hits[0] < hits[1] == 40


@pytest.mark.parametrize("policy", ["lifo", 3, "no.py:Mine"])
def test_a_wrong_policy_is_refused_by_name(policy):
    with pytest.raises(ValueError, match="scheduling_policy"):
        engine(scheduling_policy=policy)


def test_a_family_is_taken_in_whole_or_not_at_all():
    """The rank of the second of n raises: nobody is left, and the engine goes on."""

    class Picky:
        wrong = True

        def rank(self, request):
            return 1 // (1 - request.index) if self.wrong else 0

    policy = Picky()
    llm = engine(backend=BACKENDS[0], scheduling_policy=policy)
    for call in (
        lambda: llm.add_request("a", PROMPTS[0], GREEDY.clone(n=2, temperature=1.0)),
        lambda: llm.generate([PROMPTS[1], PROMPTS[0]], [GREEDY, GREEDY.clone(n=2, temperature=1.0)], use_tqdm=False),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
        assert not llm.scheduler.alive and not llm.has_unfinished_requests() and not llm.scheduler.waiting
        assert not llm.processor.families
    policy.wrong = False
    llm.add_request("a", PROMPTS[0], GREEDY.clone(n=2, temperature=1.0))
    while llm.has_unfinished_requests():
        llm.step()


def test_a_log_wants_its_policy_back(tmp_path):
    """A policy from a file is found again; an object is named, and a replay without it is refused."""
    (tmp_path / "mine.py").write_text(FROM_FILE)
    of_tiny = {"model": spec_of(TINY), "weights": numpy_weights(TINY)}
    for policy in (f"{tmp_path / 'mine.py'}:ShortestFirst", ShortestFirst()):
        log = tmp_path / "steps.jsonl"
        limits = {"num_gpu_blocks_override": 15, "max_model_len": 104}
        llm = engine(backend=BACKENDS[0], scheduling_policy=policy, step_log=str(log), **limits)
        tokens(llm, PROMPTS[:6])
        assert llm.scheduler.num_preemptions
        if not isinstance(policy, str):
            with pytest.raises(ValueError, match="is of policy 'ShortestFirst': pass it"):
                rerun(log)
            with pytest.raises(ValueError, match="is of policy 'ShortestFirst': pass it"):
                replay(log, **of_tiny)
            assert rerun(log, policy).difference is None
            assert replay(log, scheduling_policy=policy, **of_tiny).ok
        else:
            assert rerun(log).difference is None
            assert replay(log, **of_tiny).ok
    # first come, first served decides otherwise
    lines = log.read_text().replace('"policy":"ShortestFirst"', '"policy":"fcfs"')
    (tmp_path / "renamed").write_text(lines)
    assert rerun(tmp_path / "renamed").difference is not None
