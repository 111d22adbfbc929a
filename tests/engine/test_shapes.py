"""The chains of padded sizes."""

from __future__ import annotations

import pytest

from octavo.engine.batch import Shapes, at_least, steps
from octavo.models.sampling import VARIANTS

ARGUMENTS = (256, 8192, 4352, 16, 1000)


@pytest.mark.parametrize(("largest", "smallest"), [(8192, 32), (100, 32), (16, 32), (5000, 32)])
def test_steps_rise_to_the_largest_and_pad_by_a_third_at_most(largest, smallest):
    sizes = steps(largest, smallest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    for n in range(513, largest + 1):
        assert at_least(sizes, n) <= 1.5 * n


def test_heads_that_few_ask_for_have_fewer_sizes():
    shapes = Shapes.chain(*ARGUMENTS)
    for variant in VARIANTS:
        for num_logprobs in (-1, 0, 20):
            plain = num_logprobs < 0 and variant in ("greedy", "sample", "truncate")
            sizes = shapes.heads(variant, num_logprobs)
            assert sizes == (shapes.sampled if plain else shapes.sampled[2::2])
            assert sizes[-1] == ARGUMENTS[0]


def test_where_nothing_is_compiled_every_head_has_every_size():
    shapes = Shapes.chain(*ARGUMENTS, exact=True)
    assert shapes.heads("penalties", 5) == tuple(range(1, 257))


@pytest.mark.parametrize("num_seqs", [1, 2, 4, 5, 17, 32, 64, 100])
def test_few_sequences_have_a_seldom_head_too(num_seqs):
    assert Shapes.chain(num_seqs, 64, 128, 16, 100).heads("edits", 0)[-1] == num_seqs


def test_a_width_that_costs_nothing_has_few_sizes():
    assert Shapes.chain(*ARGUMENTS, any_width=True).widths == (272,)
    assert len(Shapes.chain(*ARGUMENTS).widths) > 1


def test_steps_of_a_busy_engine_are_cut_down_to_sizes_that_are_there():
    compiled, recorded = Shapes.chain(*ARGUMENTS, any_width=True), Shapes.chain(*ARGUMENTS, graph_tokens=4096)
    assert compiled.full == (1024, 2048, 4096, 8192)
    # of sizes that lie closer, those at which products cost least a token
    assert recorded.full == tuple(range(1024, 8193, 512)) and {*recorded.full} <= {*recorded.tokens}
    assert not Shapes.chain(*ARGUMENTS, exact=True).full and not Shapes.chain(256, 1000, 4352, 16, 1000).full


def test_recorded_heads_leave_out_sizes_that_wait_for_as_many_launches():
    shapes = Shapes.chain(*ARGUMENTS, graph_tokens=8192)
    assert shapes.heads("truncate", -1) == shapes.sampled == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert shapes.heads("greedy", 0) == shapes.heads("edits", -1) == (4, 16, 32, 64, 128, 256)
    assert Shapes.chain(2, 64, 128, 16, 100, graph_tokens=64).heads("edits", -1) == (2,)
