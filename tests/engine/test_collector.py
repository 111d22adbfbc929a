"""The garbage collector kept off while requests are taken in, and from everything while steps run."""

from __future__ import annotations

import gc

import pytest
from backends import BACKENDS
from tiny import PROMPTS, engine, tokens

from octavo.engine.collector import LOOKS, OWN, Paused, Seldom, age


def test_it_is_off_until_the_pause_ends() -> None:
    with Paused() as pause:
        assert not gc.isenabled()
        pause.end()
        assert gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    with pytest.raises(KeyError), Paused():
        raise KeyError
    assert gc.isenabled()


def test_who_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with Paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_overlapping_pauses_leave_it_on() -> None:
    first, second = Paused(), Paused()
    first.__enter__()
    second.__enter__()
    first.end()
    second.end()
    assert gc.isenabled()


def young() -> set[int]:
    return {id(x) for n in (0, 1) for x in gc.get_objects(generation=n)}


def test_what_was_made_to_be_kept_is_old_at_once() -> None:
    with Paused():
        made = [[] for _ in range(1000)]
        assert {id(x) for x in made} <= young()
        age()
        assert not {id(x) for x in made} & young()
    assert not gc.get_freeze_count()


def test_what_somebody_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        age()
        assert gc.get_freeze_count() > OWN
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_collection_behind_a_start_does_not_look_at_what_was_compiled(backend: str) -> None:
    gc.collect()
    llm = engine(backend=backend, warmup="all", max_num_seqs=2, max_num_batched_tokens=16)
    assert len(young()) < 5000
    assert {id(llm.runner.weights), id(llm.runner.forward)}.isdisjoint(young())


def test_everything_is_looked_at_seldom_until_the_last_block_ends() -> None:
    before, first, second = gc.get_threshold(), Seldom(), Seldom()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert gc.get_threshold() == (*before[:2], LOOKS)
    second.__exit__()
    assert gc.get_threshold() == before


def test_thresholds_that_are_set_meanwhile_stay() -> None:
    before = gc.get_threshold()
    try:
        with Seldom():
            gc.set_threshold(*before[:2], 17)
        assert gc.get_threshold() == (*before[:2], 17)
    finally:
        gc.set_threshold(*before)


def test_steps_of_a_generate_collect_what_is_young_alone() -> None:
    llm, seen = engine(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if Seldom.depth:
            seen.append(info["generation"])

    before = gc.get_threshold()
    gc.set_threshold(20, 1, 1)
    gc.callbacks.append(note)
    try:
        tokens(llm, PROMPTS[:4])
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert 1 in seen and 2 not in seen
