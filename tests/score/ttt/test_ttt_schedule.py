"""Schedules: every target once and in order, decodable by prefix, and the published order."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.errors import RecipeError
from underpar.score.ttt.schedule import (
    Chunk,
    ChunkSizes,
    Group,
    published_schedule,
    published_window,
    stream_schedule,
)

LENGTHS = st.lists(st.integers(1, 60), max_size=12)
SMALL = ChunkSizes(9, ("8:2", "20:5"))
SIZES = st.one_of(st.just(SMALL), st.builds(ChunkSizes, st.integers(1, 12), st.just(("12:3",))))


def priced(steps: Iterable[Sequence[Chunk]]) -> list[tuple[int, int]]:
    """Each (document, target) in the order of pricing."""
    chunks = itertools.chain.from_iterable(steps)
    return [(chunk.document, chunk.first + i) for chunk in chunks for i in range(chunk.count)]


def published(num_targets: list[int], group: int, sizes: ChunkSizes) -> list[Group]:
    return list(published_schedule(num_targets, [n + 1 for n in num_targets], group, sizes))


def check_chunks(steps: Iterable[Sequence[Chunk]], num_targets: Sequence[int]) -> None:
    """One turn a lane and step; a document stays in its lane and ends with its last turn."""
    places: dict[int, tuple[int, int]] = {}
    for step in steps:
        assert step
        lanes = [chunk.lane for chunk in step]
        assert lanes == sorted(set(lanes))
        for chunk in step:
            lane, done = places.get(chunk.document, (chunk.lane, 0))
            assert (chunk.lane, chunk.first) == (lane, done)
            assert chunk.count > 0
            done += chunk.count
            assert chunk.is_last == (done == num_targets[chunk.document])
            places[chunk.document] = (lane, done)


def test_sizes_of_short_documents_and_places() -> None:
    sizes = ChunkSizes()
    lengths = (2, 256, 257, 2000, 2001, 97_000)
    assert [sizes.by_length(length) for length in lengths] == [8, 8, 24, 24, 48, 48]
    places = (0, 255, 256, 1999, 2000, 97_000)
    assert [sizes.by_position(place) for place in places] == [8, 8, 24, 24, 48, 48]


def test_entries_may_come_in_any_order_or_not_at_all() -> None:
    sizes = ChunkSizes(48, ("2000:24", "256:8"))
    assert [sizes.by_length(n) for n in (256, 257, 2001)] == [8, 24, 48]
    assert ChunkSizes(7, ()).by_length(1) == ChunkSizes(7, ()).by_position(0) == 7


@pytest.mark.parametrize(
    "text", ["", "256", "256:", "256:0", "0:8", "-1:8", "a:8", "1:2:3", "8:\u0663"]
)
def test_bad_entries_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="expected 'limit:size'") as caught:
        ChunkSizes(48, ("2000:24", text))
    assert repr(text) in str(caught.value)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(RecipeError, match="chunk = 0"):
        ChunkSizes(0)
    with pytest.raises(RecipeError, match="occurs twice"):
        ChunkSizes(48, ("256:8", "256:9"))
    with pytest.raises(RecipeError, match="lanes = 0"):
        next(stream_schedule([3], 0, SMALL))
    with pytest.raises(RecipeError, match="group = 0"):
        next(published_schedule([3], [4], 0, SMALL))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), SIZES)
def test_stream_prices_every_target_once(lengths: list[int], lanes: int, sizes: ChunkSizes) -> None:
    steps = list(stream_schedule(lengths, lanes, sizes))
    assert sorted(priced(steps)) == [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    check_chunks(steps, lengths)
    for chunk in itertools.chain.from_iterable(steps):
        assert chunk.lane < lanes
        size = sizes.by_position(chunk.first)
        assert chunk.count == size or (chunk.is_last and chunk.count < size)


def test_one_lane_follows_the_file() -> None:
    lengths = [3, 30, 1, 12]
    order = priced(stream_schedule(lengths, 1, SMALL))
    assert order == [(d, i) for d, n in enumerate(lengths) for i in range(n)]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_free_lanes_take_the_next_document_at_once(lengths: list[int], lanes: int) -> None:
    steps = list(stream_schedule(lengths, lanes, SMALL))
    begun = [chunk.document for step in steps for chunk in step if chunk.first == 0]
    assert begun == list(range(len(lengths)))
    waiting = len(lengths)
    for before, step in itertools.pairwise([[], *steps]):
        free = {chunk.lane for chunk in before if chunk.is_last} if before else set(range(lanes))
        taken = [chunk.lane for chunk in step if chunk.first == 0]
        assert taken == sorted(free)[:waiting]
        waiting -= len(taken)


def test_lanes_that_end_at_once_take_documents_by_lane() -> None:
    steps = list(stream_schedule([2, 9, 2, 1, 1, 1], 3, SMALL))
    assert [[(chunk.lane, chunk.document) for chunk in step] for step in steps[:3]] == [
        [(0, 0), (1, 1), (2, 2)],
        [(0, 3), (1, 1), (2, 4)],
        [(0, 5), (1, 1)],
    ]
    assert [[chunk.lane for chunk in step] for step in steps[3:]] == [[1], [1]]


def test_a_last_document_without_targets_has_no_turn() -> None:
    assert priced(stream_schedule([2, 0], 2, SMALL)) == [(0, 0), (0, 1)]
    assert list(stream_schedule([], 2, SMALL)) == []


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 5), SIZES)
def test_lengths_not_yet_known_move_no_earlier_turn(
    data: st.DataObject, lengths: list[int], lanes: int, sizes: ChunkSizes
) -> None:
    steps = list(stream_schedule(lengths, lanes, sizes))
    cut = data.draw(st.integers(0, len(steps)))
    seen = list(itertools.chain.from_iterable(steps[:cut]))
    ended = {chunk.document for chunk in seen if chunk.is_last}
    done = {chunk.document: chunk.first + chunk.count for chunk in seen}
    other = [
        n if d in ended else done.get(d, 0) + data.draw(st.integers(1, 60))
        for d, n in enumerate(lengths)
    ]
    assert list(itertools.islice(stream_schedule(other, lanes, sizes), cut)) == steps[:cut]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), SIZES)
def test_published_prices_every_target_once(
    lengths: list[int], group_size: int, sizes: ChunkSizes
) -> None:
    groups = published(lengths, group_size, sizes)
    assert sorted(d for group in groups for d in group.documents) == list(range(len(lengths)))
    steps = [step for group in groups for step in group.steps]
    assert sorted(priced(steps)) == [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    for group in groups:
        check_chunks(group.steps, lengths)
        assert group.chunk_size == sizes.by_length(max(lengths[d] for d in group.documents) + 1)
        for index, step in enumerate(group.steps):
            assert all(group.documents[chunk.lane] == chunk.document for chunk in step)
            assert all(chunk.first == index * group.chunk_size for chunk in step)
        for document in group.documents:
            chunks = [chunk for step in group.steps for chunk in step if chunk.document == document]
            # An update follows every turn but the last.
            num_updates = sum(not chunk.is_last for chunk in chunks)
            assert num_updates == -(-lengths[document] // group.chunk_size) - 1


def test_published_order() -> None:
    groups = published([30, 3, 30, 7, 3], 2, SMALL)
    assert [group.documents for group in groups] == [(3, 0), (2,), (1, 4)]
    assert [group.chunk_size for group in groups] == [9, 9, 2]
    assert groups[2].steps == (
        (Chunk(0, 1, 0, 2, False), Chunk(1, 4, 0, 2, False)),
        (Chunk(0, 1, 2, 1, True), Chunk(1, 4, 2, 1, True)),
    )


def test_the_published_batches() -> None:
    groups = published(list(range(50_000, 0, -1)), 24, ChunkSizes(100_000, ()))
    assert len(groups) == 2084
    assert groups[0].documents == tuple(range(7, -1, -1))
    assert {len(group.documents) for group in groups[1:]} == {24}
    assert [group.documents[-1] for group in groups] == sorted(
        group.documents[-1] for group in groups
    )


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 12), st.integers(0, 40))
def test_windows_of_a_document(total: int, chunk_size: int, extra: int) -> None:
    context = chunk_size + extra
    ends = []
    for group in published([total], 1, ChunkSizes(chunk_size, ())):
        for (chunk,) in group.steps:
            start, length, offset = published_window(chunk.first, chunk.count, chunk_size, context)
            assert offset >= 0
            assert offset + chunk.count == length <= context
            assert start + offset == chunk.first
            # As much context as there is.
            assert start == 0 or length == context
            ends.append(start + length)
    assert ends == [*range(chunk_size, total, chunk_size), total]


def test_published_window_formula() -> None:
    assert published_window(96, 48, 48, 3072) == (0, 144, 96)
    assert published_window(3072, 48, 48, 3072) == (48, 3072, 3024)
    assert published_window(3072, 10, 48, 3072) == (10, 3072, 3062)
    with pytest.raises(RecipeError, match="chunk = 48: expected at most the context, 32"):
        published_window(0, 8, 48, 32)
