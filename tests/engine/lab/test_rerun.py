"""A logged run's decisions are made again, and its requests' stories told, from the log alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from backends import BACKENDS
from scheduler_world import add, make_request, run
from tiny import GREEDY, PROMPTS, RANDOM, VOCAB, engine, tokens

from octavo.engine.block_manager import BlockManager
from octavo.engine.lab.explaining import SAYS, explain
from octavo.engine.lab.rerun import rerun
from octavo.engine.limits import SchedulerConfig
from octavo.engine.plan import Reason
from octavo.engine.recorded_scheduler import RecordedScheduler
from octavo.engine.step_log import StepLog


@pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "synchronous"])
def log_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with preemptions, prefix hits, forks, an abort, a stop string's kind of end, and a reset cache."""
    path = tmp_path_factory.mktemp("log") / "steps.jsonl"
    llm = engine(
        backend=BACKENDS[0],
        num_gpu_blocks_override=15,
        max_model_len=104,
        step_log=str(path),
        async_scheduling=request.param,
    )
    tokens(llm, PROMPTS[:7], RANDOM)
    assert llm.reset_prefix_cache()
    tokens(llm, [PROMPTS[3]], replace(RANDOM, n=3))
    for name in ("aborted", "kept"):
        llm.add_request(name, PROMPTS[0], GREEDY)
    for _ in range(4):
        llm.step()
    llm.set_limits(max_num_seqs=1, max_num_batched_tokens=7)
    llm.abort("aborted")
    while llm.has_unfinished_requests():
        llm.step()
    assert llm.scheduler.num_preemptions > 2
    return path


def test_every_decision_is_made_again(log_path):
    found = rerun(log_path)
    assert found.difference is None
    assert len(found.requests) == 12 and found.num_steps > 100


def _altered(path: Path, target: Path, change: Any) -> int:
    """A copy in which `change` has altered one line, the first for which it returns True; that line's number."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    number = next(i for i, line in enumerate(lines, 1) if change(line))
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return number


def _one_chunk_longer(line):
    if line.get("plan", {}).get("step") != 20:
        return False
    line["plan"]["chunks"][-1][3] += 1
    return True


def _another_block(line):
    if not line.get("plan", {}).get("table_writes") or line["plan"]["step"] < 20:
        return False
    line["plan"]["table_writes"][0][3][0] += 1
    return True


def _a_reason_less(line):
    return line.get("plan", {}).get("step", 0) > 20 and line["plan"].pop("reasons", None) is not None


@pytest.mark.parametrize(
    ("change", "what"),
    [(_one_chunk_longer, "chunks"), (_another_block, "table_writes"), (_a_reason_less, "reasons")],
    ids=["chunk", "block", "reason"],
)
def test_an_altered_plan_is_named(log_path, tmp_path, change, what):
    number = _altered(log_path, tmp_path / "altered", change)
    difference = rerun(tmp_path / "altered").difference
    assert difference is not None
    assert (difference.line, difference.what) == (number, what)
    assert difference.request_id is not None


def test_a_story_is_whole(log_path):
    """Each computed token is told of, and periods follow each other."""
    lines = [json.loads(line) for line in log_path.read_text().splitlines()]
    plans = [line["plan"] for line in lines if "plan" in line]
    for name in ("0", "3", "1_7", "aborted", "kept"):
        periods = explain(log_path, name)
        computed = sum(c[3] for plan in plans for c in plan["chunks"] if c[0] == name)
        assert sum(p.num_tokens for p in periods) == computed > 0
        assert all(a.last_step <= b.first_step for a, b in itertools.pairwise(periods))
        assert periods[-1].what.startswith("ends")
        assert any(p.what.startswith("starts") for p in periods)


def test_a_story_says_why(log_path):
    told = {name: " | ".join(p.what for p in explain(log_path, name)) for name in ("3", "5", "1_7", "aborted")}
    assert "blocks do not fit" in told["3"]
    assert "waits behind request" in told["5"]
    assert "40 of 41 tokens are in the cache" in told["5"]
    assert "the first of its family computes the prompt" in told["1_7"]
    assert "taken over from a running sibling" in told["1_7"]
    assert told["aborted"].endswith("ends: abort")
    preempted = [name for name in map(str, range(7)) if "preempted" in str(explain(log_path, name))]
    assert preempted
    assert all("starts again after the preemption" in str(explain(log_path, name)) for name in preempted)


def test_an_unknown_request_is_refused_with_those_that_are_known(log_path):
    with pytest.raises(ValueError, match=r"no request 'nobody': it has '0', '1'.* and 4 more"):
        explain(log_path, "nobody")


def test_every_reason_has_words():
    assert set(SAYS) == set(Reason)


def test_a_preemption_that_no_plan_tells_of_is_logged(tmp_path):
    """One request's token is in flight; the other, in the middle of its prompt, has to go: nothing can run."""
    blocks = BlockManager([None], [5], 4, True, 4)
    scheduler = RecordedScheduler(SchedulerConfig(2, 4, 16, batches=2), blocks)
    scheduler.log = StepLog(tmp_path / "log", {"scheduler": scheduler.dump()})
    add(scheduler, make_request("flies", range(3), max_tokens=9), make_request("grows", range(100, 112), max_tokens=1))
    unread, idle = [scheduler.schedule()], 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        idle += plan is None and scheduler.num_preemptions > 0
        if plan is not None:
            unread.append(plan)
        if unread:
            read = unread.pop(0)
            tokens = [7] * len(read.sampled)
            scheduler.update(read, tokens)
            scheduler.log.append(read, tokens, None)
    assert idle == 1 and scheduler.num_preemptions == 1
    found = rerun(tmp_path / "log")
    assert found.difference is None and found.num_steps == scheduler.step


def test_blocks_kept_for_a_sibling_and_given_back_while_nothing_runs_are_logged(tmp_path):
    """A stage later the sibling finds its prompt in the cache, and nobody to fork from."""
    config = SchedulerConfig(2, 16, 16, batches=2, watermark=0.45)
    scheduler = RecordedScheduler(config, BlockManager([None], [7], 4, True, 16))
    scheduler.log = StepLog(tmp_path / "log", {"scheduler": scheduler.dump()})

    def read(plan, token):
        scheduler.update(plan, [token] * len(plan.sampled))
        scheduler.log.append(plan, [token] * len(plan.sampled), None)

    first = make_request("0", range(10, 15), eos_ids={9})
    other = make_request("1", range(10, 15), 1, first=first, index=1)
    add(scheduler, make_request("flies", range(4), eos_ids={9}), first, other)
    one, two = scheduler.schedule(), scheduler.schedule()
    read(one, 7)
    three = scheduler.schedule()
    read(two, 9)
    assert scheduler.estates.kept == [first]
    assert scheduler.schedule() is None and not scheduler.estates.kept
    read(three, 9)
    read(scheduler.schedule(), 7)
    assert (other.finish_reason, other.num_cached) == ("length", 4)
    assert rerun(tmp_path / "log").difference is None


def test_a_seat_given_up_that_no_plan_tells_of_is_logged(tmp_path):
    """Its blocks are free before another's that is aborted, and so are taken in another order."""
    scheduler = RecordedScheduler(SchedulerConfig(2, 16, 16), BlockManager([None], [9], 4, True, 16))
    scheduler.log = StepLog(tmp_path / "log", {"scheduler": scheduler.dump()})
    ends, fails = make_request("ends", range(3), max_tokens=1), make_request("fails", range(5, 9), max_tokens=1)
    add(scheduler, ends, fails)
    plan = scheduler.schedule()
    assert scheduler.schedule() is None
    scheduler.finish(fails, "abort")
    scheduler.update(plan, [7, 7])
    scheduler.log.append(plan, [7, 7], None)
    run(scheduler, make_request("next", range(20, 29), max_tokens=1))
    assert '{"idle":1}' in (tmp_path / "log").read_text()
    assert rerun(tmp_path / "log").difference is None


@pytest.mark.parametrize("overlapped", [True, False], ids=["overlapped", "synchronous"])
def test_a_last_token_that_completes_a_stop_string_is_told_of_as_the_output_does(overlapped, tmp_path):
    """Both where a later plan tells of the end, and where the log ends with it."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "steps.jsonl"
    llm = engine(backend=BACKENDS[0], tokenizer=str(tmp_path), step_log=str(path), async_scheduling=overlapped)
    alone, ends = tokens(engine(backend=BACKENDS[0]), PROMPTS[:2], replace(GREEDY, max_tokens=12)), {}
    for name, i, length in (("early", 0, 6), ("last", 1, 12)):
        stop = " ".join(f"w{token}" for token in alone[i][length - 3 : length])
        llm.add_request(name, PROMPTS[i], replace(GREEDY, max_tokens=length, stop=[stop]))
    while llm.has_unfinished_requests():
        ends |= {output.request_id: output.outputs[0] for output in llm.step() if output.finished}
    assert {name: (len(o.token_ids), o.finish_reason) for name, o in ends.items()} == {
        "early": (6, "stop"),
        "last": (12, "stop"),
    }
    assert [explain(path, name)[-1].what for name in ends] == ["ends: stop"] * 2
    found = rerun(path)
    assert found.difference is None and found.requests["early"].finish_reason == "stop"
