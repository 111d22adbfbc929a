"""The line of statistics."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from tiny import GREEDY, PROMPTS, engine

from octavo.engine.stats import INTERVAL, StatsLogger


def test_a_line_every_interval_says_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    llm, now = engine(disable_log_stats=False, async_scheduling=False), [0.0]
    assert isinstance(llm.stats, StatsLogger)
    llm.stats = StatsLogger([llm.metrics], clock=lambda: now[0])
    for i in range(6):
        llm.add_request(str(i), PROMPTS[0], replace(GREEDY, max_tokens=3))
    with caplog.at_level(logging.INFO, logger="octavo"):
        for seconds in (INTERVAL / 2, INTERVAL / 2 + 1):
            now[0] += seconds
            llm.step()
    lines = [r.getMessage() for r in caplog.records if "throughput" in r.getMessage()]
    assert len(lines) == 1
    seconds = INTERVAL + 1
    assert f"prompt throughput: {llm.scheduler.num_prompt_tokens / seconds:.1f} tokens/s" in lines[0]
    assert f"generation throughput: {8 / seconds:.1f} tokens/s" in lines[0]
    assert "running: 4 requests, waiting: 2 requests" in lines[0] and "preemptions: 0" in lines[0]
    llm.abort([str(i) for i in range(6)])


def test_nothing_is_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    assert engine().stats is None
