"""A step log gives back what was put in."""

from __future__ import annotations

import json
import re

import pytest

from octavo.engine.plan import Admission, Chunk, Edits, Plan, Reason, TableWrite, Transfer
from octavo.engine.step_log import Entry, StepLog, from_json, read_log, to_json

PLANS = [
    Plan(0, (Chunk("a", 0, 0, 5, True),)),
    Plan(
        7,
        (Chunk("a", 0, 5, 1, True), Chunk("0_b\n", 3, 4, 2, False)),
        (
            Admission(3, (1, 2, 3), 2, 3, (-(2**31), 2**31 - 1), (0.1, 40.0, 0.95, 1e-45)),
            Admission(1, (9,), 0, 1, (0, 1), (0.0, 0.0, 1.0, 0.0), 4, (2, 11)),
            Admission(2, (9,), 0, 1, (0, 1), (0.0,), edits=Edits((1, 5), ((3, -0.1),), ((4,), (5, 6)), ((0, 1.0),))),
            Admission(0, (9,), 0, 1, (0, 1), (0.0,), 1, (3,), Edits(bad_words=((1, 2),))),
        ),
        (TableWrite(0, 3, 0, (5, 6)), TableWrite(1, 0, 2, (0,))),
        (Transfer(1, 4, 6),),
        "penalties",
        5,
        (("a", Reason.PREEMPTED), ("0_b\n", Reason.ADMITTED)),
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=["smallest", "every-field"])
def test_plan_survives_json(plan):
    copy = from_json(json.loads(json.dumps(to_json(plan))))
    assert copy == plan
    assert repr(copy) == repr(plan)
    assert hash(copy) == hash(plan)


def test_log_gives_back_header_and_steps(tmp_path):
    header = {"versions": {"jax": "0.10.2"}, "threads": 2, "buckets": [1, 2]}
    log = StepLog(tmp_path / "log", header)
    log.planned(PLANS[0])
    log.write("add", {"id": "b"})
    log.planned(PLANS[1])
    log.append(PLANS[0], [17], [-5])
    log.append(PLANS[1], [3], None)
    # not closed: a log must be whole after every step
    assert read_log(tmp_path / "log") == (header, [Entry(PLANS[0], [17], [-5], 5), Entry(PLANS[1], [3], None, 6)])
    log.close()


def test_line_cut_short_is_named(tmp_path):
    log = StepLog(tmp_path / "log", {})
    log.planned(PLANS[0])
    log.close()
    text = (tmp_path / "log").read_text()
    (tmp_path / "log").write_text(text[:-9])
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_log(tmp_path / "log")


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "it is empty"),
        ('{"header":{"model":"long"},"format":2}\n', "it has format 2, so use the version"),
        ("{}\n", "{}"),
        ("[3]\n", "[3]"),
    ],
    ids=["empty", "older", "other", "list"],
)
def test_other_format_is_refused(tmp_path, text, why):
    (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=f"not a step log of format 3: {re.escape(why)}"):
        read_log(tmp_path / "log")


def test_a_step_that_nobody_planned_is_named(tmp_path):
    log = StepLog(tmp_path / "log", {})
    log.append(PLANS[0], [17], [-5])
    with pytest.raises(ValueError, match="line 2 reads step 0"):
        read_log(tmp_path / "log")
