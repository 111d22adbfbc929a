"""The garbage collector kept off while requests are taken in."""

from __future__ import annotations

import gc

import pytest

from octavo.engine.collector import Paused


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
