"""Free queue, references, keys; hits, windows and forks of the manager above it."""

from __future__ import annotations

import hashlib
import random

import pytest

from octavo.engine import block_hashes
from octavo.engine.block_hashes import MOST_REMEMBERED, ROOT, BlockKey, Hasher, extra_keys
from octavo.engine.block_manager import BlockManager
from octavo.engine.block_pool import BlockPool
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams

A, B = (hashlib.sha256(name).digest() for name in (b"a", b"b"))


def _make_manager(windows=(None,), num_blocks=20, caching=True, budget=16):
    return BlockManager(windows, [num_blocks] * len(windows), 4, caching, budget)


def _make_request(tokens: int, row: int = 0, salt: str | None = None) -> Request:
    r = Request(f"{tokens}", list(range(tokens)), SamplingParams(), cache_salt=salt)
    r.row = row
    return r


def _compute(blocks: BlockManager, r: Request, upto: int) -> None:
    """As if steps had computed its tokens below `upto`, one by one."""
    while r.computed < upto:
        assert blocks.reserve(r, r.computed + 1, [])
        r.computed += 1
        blocks.register(r)


def _start(blocks: BlockManager, r: Request) -> int:
    """Admits and computes a request; the length of its hit."""
    hit = blocks.lookup(r)
    assert blocks.admit(r, hit, hit.length + 1, 0)
    _compute(blocks, r, len(r.tokens))
    return hit.length


def test_blocks_are_handed_out_in_order_without_the_null_block():
    pool = BlockPool(4)
    assert [pool.take() for _ in range(3)] == [1, 2, 3]
    assert not pool.free


def test_freed_blocks_without_a_key_are_reused_at_once_and_hashed_ones_last():
    pool = BlockPool(6)
    taken = [pool.take() for _ in range(4)]
    pool.register([1], [A])
    pool.register([2], [B])
    pool.release(reversed(taken))
    # 4 and 3 in front of the never used 5, the later freed first; 2 before 1: the tail is evicted before the head
    assert list(pool.free) == [3, 4, 5, 2, 1]


def test_taking_a_hashed_block_forgets_it():
    pool = BlockPool(2)
    pool.register([pool.take()], [A])
    pool.release([1])
    assert pool.find(A) == 1
    assert pool.take() == 1
    assert pool.find(A) is None
    assert not pool.key_of


def test_shared_block_is_free_after_the_last_release():
    pool = BlockPool(3)
    block = pool.take()
    pool.share([block])
    pool.release([block])
    assert block not in pool.free
    pool.release([block])
    assert block in pool.free
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_hit_takes_a_free_block_out_of_the_middle_of_the_queue():
    pool = BlockPool(5)
    taken = [pool.take() for _ in range(3)]
    for block, digest in zip(taken, (A, B, ROOT)):
        pool.register([block], [digest])
    pool.release(taken)
    pool.share([2])
    assert list(pool.free) == [4, 1, 3]
    assert pool.refs[2] == 1


@pytest.mark.parametrize("evicted, found", [(1, 2), (2, 1)], ids=["first-holder", "duplicate"])
def test_duplicates_are_both_kept_and_the_first_is_found(evicted, found):
    pool = BlockPool(3)
    for block in (pool.take(), pool.take()):
        pool.register([block], [A])
    assert pool.find(A) == 1
    pool.release([evicted])
    assert pool.take() == evicted
    assert pool.find(A) == found
    pool.release([found])
    assert pool.take() == found
    assert pool.find(A) is None
    assert not pool.duplicates


def test_dumped_pool_goes_on_alike():
    pool, copy = BlockPool(6, group=3), BlockPool(6, group=3)
    for digest in (A, A, B):
        pool.register([pool.take()], [digest])
    pool.release([3, 1])
    copy.restore(pool.dump())
    for p in (pool, copy):
        p.share([3])
    assert copy.dump() == pool.dump()
    assert [copy.take() for _ in range(3)] == [pool.take() for _ in range(3)] == [4, 5, 1]
    assert copy.find(A) == pool.find(A) == 2


KEYS = {
    "tokens": BlockKey(ROOT, (1, 2)),
    "order": BlockKey(ROOT, (2, 1)),
    "fewer": BlockKey(ROOT, (1,)),
    "parent": BlockKey(A, (1, 2)),
    "salt": BlockKey(ROOT, (1, 2), (("salt", b"x"),)),
    "other-salt": BlockKey(ROOT, (1, 2), (("salt", b"y"),)),
    "other-kind": BlockKey(ROOT, (1, 2), (("lora", b"x"),)),
    "split-elsewhere": BlockKey(ROOT, (1, 2), (("sal", b"tx"),)),
    "two-kinds": BlockKey(ROOT, (1, 2), (("lora", b"x"), ("salt", b"x"))),
    "token-bytes-as-salt": BlockKey(ROOT, (), (("salt", b"\1\0\0\0\2\0\0\0"),)),
}


def test_different_keys_have_different_digests():
    assert len({key.digest() for key in KEYS.values()}) == len(KEYS)


def test_digest_is_the_same_in_every_process():
    assert KEYS["salt"].digest().hex() == "fc7c5e49989fc7cbb22248d404b21a2906e1d5f0acf92e65d0b3da1fd14d2c96"


def _hashes(tokens: list[int], salt: str | None = None, embeds: tuple[bytes, ...] = ()) -> Request:
    return Request("r", tokens, SamplingParams(), cache_salt=salt, block_digests=embeds)


def _by_key(r: Request, size: int) -> list[bytes]:
    """The hashes of a request, one BlockKey after another."""
    found, parent = [], ROOT
    for i in range(len(r.tokens) // size):
        parent = BlockKey(parent, tuple(r.tokens[i * size : (i + 1) * size]), extra_keys(r, i)).digest()
        found.append(parent)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_hashes_are_the_digests_of_keys_however_prompts_begin_alike(seed: int):
    rng, hasher = random.Random(seed), Hasher(4)
    stems = [[rng.randrange(3) for _ in range(20)] for _ in range(3)]
    for _ in range(200):
        tokens = rng.choice(stems)[: rng.randrange(1, 21)] + [rng.randrange(3) for _ in range(rng.randrange(9))]
        embeds = tuple(bytes([rng.randrange(2)]) for _ in range(rng.choice([0, 0, 0, 2])))
        r = _hashes(tokens, rng.choice([None, "x", "y"]), embeds)
        hasher.extend(r)
        assert r.hashes == _by_key(r, 4)
        r.tokens += [rng.randrange(3) for _ in range(rng.randrange(9))]
        hasher.extend(r)
        assert r.hashes == _by_key(r, 4)


def test_where_prompts_begin_alike_digests_are_made_once(monkeypatch):
    hasher, made = Hasher(4), []
    real = block_hashes.digests_of

    def counted(parent, data, size, extras):
        made.append(len(data) // (4 * size))
        return real(parent, data, size, extras)

    monkeypatch.setattr(block_hashes, "digests_of", counted)
    for tail in ([1], [2] * 4, [3] * 8):
        hasher.extend(_hashes(list(range(40)) + tail))
    assert made == [1, 9, 1, 1, 1, 2]


def test_few_beginnings_are_remembered():
    hasher = Hasher(4)
    for i in range(2 * MOST_REMEMBERED):
        hasher.extend(_hashes([i] * 4))
    assert len(hasher.remembered) == MOST_REMEMBERED


def test_groups_have_different_keys():
    pools = [BlockPool(2, group) for group in (0, 1)]
    for pool in pools:
        pool.register([pool.take()], [A])
    assert not pools[0].holder.keys() & pools[1].holder.keys()


@pytest.mark.parametrize("length, hit", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_hit_is_in_whole_blocks_and_leaves_a_token_to_compute(length, hit):
    blocks = _make_manager()
    first = _make_request(length)
    assert _start(blocks, first) == 0
    blocks.release(first)
    assert blocks.lookup(_make_request(length)).length == hit


def test_generated_tokens_can_be_hit():
    blocks, r = _make_manager(), _make_request(6)
    _start(blocks, r)
    r.tokens += [6, 7]
    _compute(blocks, r, 8)
    assert blocks.lookup(_make_request(9)).length == 8


def test_block_with_a_token_in_flight_cannot_be_hit():
    blocks, r = _make_manager(), _make_request(7)
    _start(blocks, r)
    # the eighth token is scheduled, but its value is not known yet
    _compute(blocks, r, 8)
    assert blocks.lookup(_make_request(9)).length == 4
    r.tokens.append(7)
    blocks.register(r)
    assert blocks.lookup(_make_request(9)).length == 8


@pytest.mark.parametrize("window, end, nulls", [(1, 12, 2), (4, 12, 1), (5, 12, 1), (8, 12, 0), (9, 12, 0), (8, 16, 1)])
def test_window_hit_needs_only_the_last_blocks(window, end, nulls):
    blocks, r = _make_manager([window]), _make_request(end)
    r.row = 0
    _start(blocks, r)
    longer = _make_request(end + 1)
    hit = blocks.lookup(longer)
    assert hit.length == end
    # the query at `end` sees window - 1 tokens before it
    needed = -(-(window - 1) // 4)
    assert hit.blocks[0][: end // 4 - needed] == (0,) * (end // 4 - needed)
    assert all(hit.blocks[0][end // 4 - needed :])
    # freed when the last token was still to come, and one token later than that one's window allows
    assert r.blocks[0][:nulls] == [0] * nulls
    assert all(r.blocks[0][nulls:])


def test_hit_of_two_groups_is_what_both_hold():
    blocks, r = _make_manager([None, 8]), _make_request(24)
    _start(blocks, r)
    blocks.release(r)
    window = blocks.pools[1]
    # evict the block of tokens 16 to 19 from the window group alone: the full group still holds all six
    gone = window.holder[r.hashes[4] + window.suffix]
    window.free.move_to_end(gone, last=False)
    assert window.take() == gone
    # tokens 8 to 15 were behind the window at 24 and freed, but not reused
    assert blocks.lookup(_make_request(25)).length == 16


def test_window_group_never_holds_more_than_its_peak():
    blocks, r = _make_manager([6], budget=5), _make_request(60)
    assert blocks.admit(r, blocks.lookup(r), 5, 0)
    r.computed, most = 5, 0
    while r.computed < 60:
        assert blocks.reserve(r, r.computed + 5, [])
        r.computed += 5
        most = max(most, sum(map(bool, r.blocks[0])))
    # ceil((6 + 5) / 4) + 1
    assert most <= blocks.peak(0, 60, 60) == 4
    assert most >= 3


def test_freed_window_blocks_become_null_in_the_plan_too():
    blocks, r, writes = _make_manager([4]), _make_request(12), []
    assert blocks.admit(r, blocks.lookup(r), 12, 0)
    r.computed = 12
    assert blocks.reserve(r, 13, writes)
    # the first of the freed ones is in front of the free queue, and taken at once
    assert [(w.index, w.blocks) for w in writes] == [(0, (0, 0)), (3, (1,))]
    assert r.blocks[0] == [0, 0, 3, 1]


@pytest.mark.parametrize("length, shared, copied", [(6, 1, True), (9, 2, False), (8, 1, True), (1, 0, False)])
def test_fork_shares_full_blocks_and_copies_the_last_one(length, shared, copied):
    blocks, source = _make_manager(caching=False), _make_request(length)
    _start(blocks, source)
    hit = blocks.fork(_make_request(length), source)
    assert hit is not None
    assert hit.length == length - 1
    assert hit.blocks == (tuple(source.blocks[0][:shared]),)
    assert hit.copies == (((0, source.blocks[0][shared], shared),) if copied else ())


def test_fork_fails_once_the_window_has_moved_on():
    blocks, source = _make_manager([None, 4]), _make_request(9)
    _start(blocks, source)
    assert blocks.reserve(source, 10, [])
    assert blocks.fork(_make_request(9), source)
    source.tokens += [9] * 8
    _compute(blocks, source, 16)
    assert blocks.fork(_make_request(9), source) is None


def test_cache_that_is_off_remembers_nothing():
    blocks, r = _make_manager(caching=False), _make_request(9)
    _start(blocks, r)
    assert blocks.lookup(_make_request(9)).length == 0
    assert not blocks.pools[0].holder
    assert not r.hashes


def test_admission_counts_free_blocks_that_it_hits():
    blocks, r = _make_manager(num_blocks=4), _make_request(12)
    _start(blocks, r)
    blocks.release(r)
    longer = _make_request(13)
    hit = blocks.lookup(longer)
    # 3 of 3 blocks are free, but the hit is on all of them, and a fourth is needed
    assert hit.length == 12
    assert not blocks.admit(longer, hit, 13, 0)
    assert len(blocks.pools[0].free) == 3
    assert sum(blocks.pools[0].refs) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([None], [9, 9], 4, True, 8), "1 windows and 2 pools"),
        (([None], [9], 12, True, 8), "block_size 12 is not a power of two"),
        (([None], [1], 4, True, 8), r"num_blocks \[1\]"),
        (([0], [9], 4, True, 8), r"windows \[0\]"),
    ],
    ids=["lengths", "block-size", "pool", "window"],
)
def test_wrong_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockManager(*arguments)


def test_usage_is_that_of_the_fullest_group():
    blocks = BlockManager([None, None], [11, 5], 4, True, 16)
    assert blocks.usage() == 0
    r = _make_request(8)
    assert blocks.admit(r, blocks.lookup(r), 8, 0)
    assert blocks.usage() == 0.5
