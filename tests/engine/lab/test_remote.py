"""An object in a process of its own: asked, told what went wrong, and gone when it is closed."""

from __future__ import annotations

import os
from collections import Counter
from fractions import Fraction

import pytest

from octavo.engine.lab.remote import Remote


@pytest.fixture
def counter():
    remote = Remote(Counter, "abca")
    yield remote
    remote.close()


def test_methods_and_attributes_are_those_of_the_object(counter):
    assert counter.call("most_common", 1) == [("a", 2)]
    counter.call("update", "bb")
    assert counter.call("total") == 6
    assert counter.call("__doc__") == Counter.__doc__
    assert counter.child.pid != os.getpid()


def test_an_error_is_raised_here_and_the_next_call_is_answered(counter):
    with pytest.raises(AttributeError, match="no_such_thing") as told:
        counter.call("no_such_thing")
    assert "in another process" in "".join(told.value.__notes__)
    assert counter.call("total") == 4


def test_what_making_it_raises_is_raised_by_the_first_call():
    remote = Remote(Fraction, "half")
    with pytest.raises(ValueError, match="Invalid literal for Fraction: 'half'"):
        remote.wait()
    remote.close()


def test_a_process_that_is_gone_is_told_with_its_status_and_close_ends_one(counter):
    counter.wait()
    counter.child.process.kill()
    # then its end of the pipe is closed too
    counter.child.process.wait()
    with pytest.raises(RuntimeError, match="ended with exit status -9"):
        counter.call("total")
    other = Remote(Counter)
    assert other.child.process.poll() is None
    other.close()
    assert other.child.process.poll() is not None
