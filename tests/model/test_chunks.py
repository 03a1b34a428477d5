"""Chunks of a pack and of lanes: what is a chunk, and what does not fit."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from underpar.data.batch import segments_from_starts
from underpar.model.chunks import LaneChunks, PackedChunks, cut
from underpar.model.kv_cache import LaneCache, PackedCache
from underpar.recipe import ModelSpec

SPEC = ModelSpec(
    vocab_size=260, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, mlp_dim=8, context=16
)
CPU = torch.device("cpu")


def packed(lengths: list[int], marks: list[bool], room: int = 0) -> tuple[PackedCache, Tensor]:
    """A pack of documents cut at 16 tokens, and a boundary at each start and where `marks` says."""
    starts = np.cumsum([0, *lengths[:-1]])
    cache = PackedCache(segments_from_starts(starts, sum(lengths), SPEC.context))
    marked = torch.tensor(marks[: sum(lengths)] + [False] * max(0, sum(lengths) - len(marks)))
    return cache, marked | (cache.positions == 0)


def chunk_of_each(is_boundary: Tensor) -> list[int]:
    """The chunk of each token, counted one by one."""
    chunks, chunk = [], -1
    for mark in is_boundary.tolist():
        chunk += mark
        chunks.append(chunk)
    return chunks


PACKS = {
    "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=5),
    "marks": st.lists(st.booleans(), max_size=120),
}


@settings(max_examples=60, deadline=None)
@given(**PACKS)
def test_chunks_are_a_partition(lengths: list[int], marks: list[bool]) -> None:
    cache, is_boundary = packed(lengths, marks)
    chunks = PackedChunks(cache, is_boundary)
    places = torch.arange(len(is_boundary))
    first = chunks.gather(places)
    expected = chunk_of_each(is_boundary)
    # What stands for the chunk of each token is the first of its chunk, in its own segment.
    assert first.tolist() == [expected.index(c) for c in range(expected[-1] + 1)]
    of_token = chunks.spread(first[:, None].double())[:, 0]
    assert of_token.tolist() == [expected.index(c) for c in expected]
    segment = torch.bucketize(places, cache.cu[1:].long(), right=True)
    assert torch.equal(segment[of_token.long()], segment)
    # Positions count the chunks of a segment, and cu cuts where positions begin again.
    assert chunks.cu[-1] == len(first) == is_boundary.sum()
    begins = [0, *chunks.cu.tolist()]
    assert {p for p in range(len(first)) if chunks.positions[p] == 0} <= set(begins)
    steps = chunks.positions[1:] - chunks.positions[:-1]
    assert ((steps == 1) | (chunks.positions[1:] == 0)).all()
    assert (chunks.cu[1:] - chunks.cu[:-1]).max() <= chunks.max_len


@settings(max_examples=60, deadline=None)
@given(**PACKS, spare=st.integers(0, 70))
def test_room_that_is_not_needed_changes_nothing(
    lengths: list[int], marks: list[bool], spare: int
) -> None:
    cache, is_boundary = packed(lengths, marks)
    exact, num = PackedChunks(cache, is_boundary), int(is_boundary.sum())
    assume(num + spare < len(is_boundary))
    roomy = PackedChunks(cache, is_boundary, num + spare)
    x = torch.randn(len(is_boundary), 3)
    assert torch.equal(roomy.gather(x)[:num], exact.gather(x))
    assert not roomy.gather(x)[num:].any()
    assert torch.equal(roomy.spread(roomy.gather(x)), exact.spread(exact.gather(x)))
    assert torch.equal(roomy.positions[:num], exact.positions)
    # Spare chunks are in segments of their own, none longer than the bound.
    assert roomy.cu[-1] == num + spare
    assert num in roomy.cu.tolist()
    assert (roomy.cu[1:] - roomy.cu[:-1]).max() <= roomy.max_len


@settings(max_examples=60, deadline=None)
@given(**PACKS)
def test_room_for_a_chunk_per_token_makes_shapes_of_places_alone(
    lengths: list[int], marks: list[bool]
) -> None:
    cache, is_boundary = packed(lengths, marks)
    num_tokens = len(is_boundary)
    exact, roomy = (PackedChunks(cache, is_boundary, room) for room in (0, num_tokens))
    assert torch.equal(roomy.cu, cache.cu) and roomy.max_len == cache.max_len
    x = torch.randn(num_tokens, 3)
    assert torch.equal(roomy.spread(roomy.gather(x)), exact.spread(exact.gather(x)))
    # The same chunks in the same order, at the first places of each segment.
    marked = roomy.gather(torch.arange(1, num_tokens + 1))
    used = marked > 0
    assert torch.equal(marked[used] - 1, exact.gather(torch.arange(num_tokens)))
    assert torch.equal(roomy.positions[used], exact.positions)
    for begin, end in pairwise(cache.cu.tolist()):
        assert used[begin:end].tolist() == sorted(used[begin:end].tolist(), reverse=True)
    p = torch.rand(num_tokens) / 2 + 0.5
    blends = [c.spread(c.smooth(c.gather(x), c.gather(p))) for c in (exact, roomy)]
    torch.testing.assert_close(*blends)


@settings(max_examples=60, deadline=None)
@given(**PACKS, missing=st.integers(1, 60))
def test_what_does_not_fit_is_decided_from_left_to_right(
    lengths: list[int], marks: list[bool], missing: int
) -> None:
    cache, is_boundary = packed(lengths, marks)
    room = max(1, int(is_boundary.sum()) - missing)
    chunks = PackedChunks(cache, is_boundary, room)
    expected = chunk_of_each(is_boundary)
    starts = torch.arange(len(is_boundary)) - cache.positions
    got = chunks.spread(torch.arange(1.0, room + 1)[:, None])[:, 0].tolist()
    for token, chunk in enumerate(expected):
        begin = expected[int(starts[token])]
        # The last chunk that fits, or zeros if the segment began after it.
        assert got[token] == (min(chunk, room - 1) + 1 if begin < room else 0)
    assert chunks.cu[-1] == room


def test_lanes_keep_their_chunk_until_the_next_boundary() -> None:
    cache = LaneCache(SPEC, 2, CPU)
    marks = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0]], dtype=torch.bool)
    given_to, positions = [], []
    for step, is_boundary in enumerate(marks):
        cache.place()
        chunks = cut(cache, is_boundary)
        assert isinstance(chunks, LaneChunks)
        positions.append(chunks.positions.tolist())
        given_to.append(chunks.spread(torch.full((2, 1), float(step)))[:, 0].tolist())
        cache.advance()
    assert given_to == [[0, 0], [0, 1], [2, 1], [2, 1]]
    # A lane without a boundary stands where its next chunk will be.
    assert positions == [[0, 0], [1, 1], [1, 2], [2, 2]]


def test_a_lane_that_is_kept_keeps_its_chunks() -> None:
    cache = LaneCache(SPEC, 3, CPU)
    cache.place()
    cut(cache, torch.ones(3, dtype=torch.bool)).spread(torch.tensor([[1.0], [2.0], [3.0]]))
    cache.advance()
    cache.keep(torch.tensor([2, 0]))
    cache.place()
    chunks = cut(cache, torch.tensor([False, True]))
    assert chunks.positions.tolist() == [1, 1]
    assert chunks.spread(torch.tensor([[8.0], [9.0]]))[:, 0].tolist() == [3.0, 9.0]


def test_a_new_document_begins_new_chunks() -> None:
    cache = LaneCache(SPEC, 2, CPU)
    for _ in range(3):
        cache.place()
        cut(cache, torch.ones(2, dtype=torch.bool))
        cache.advance()
    cache.reset(torch.tensor([True, False]))
    cache.place()
    assert cut(cache, torch.ones(2, dtype=torch.bool)).positions.tolist() == [0, 3]


@pytest.mark.parametrize("kind", ["pack", "lanes"])
def test_the_chunk_before(kind: str) -> None:
    x = torch.arange(1.0, 7.0)[:, None]
    is_boundary = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    if kind == "pack":
        cache, _ = packed([6], [])
        chunks = PackedChunks(cache, is_boundary)
        before = chunks.previous("x", chunks.gather(x))[:, 0].tolist()
    else:
        lanes, before = LaneCache(SPEC, 1, CPU), []
        for row, mark in zip(x, is_boundary, strict=True):
            lanes.place()
            chunk = cut(lanes, mark[None])
            last = float(chunk.previous("x", chunk.gather(row[None])))
            before += [last] if mark else []
            lanes.advance()
    assert before == [0.0, 1.0, 3.0, 4.0]
