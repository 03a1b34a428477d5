"""Schedules: every target once and in order, decodable by prefix, and the published order."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.errors import RecipeError
from underpar.score.ttt.schedule import (
    Chunks,
    Group,
    Turn,
    published_schedule,
    published_window,
    stream_schedule,
)

LENGTHS = st.lists(st.integers(1, 60), max_size=12)
SMALL = Chunks(9, ("8:2", "20:5"))
SIZES = st.one_of(st.just(SMALL), st.builds(Chunks, st.integers(1, 12), st.just(("12:3",))))


def priced(steps: Iterable[Sequence[Turn]]) -> list[tuple[int, int]]:
    """Each (document, target) in the order of pricing."""
    turns = itertools.chain.from_iterable(steps)
    return [(t.document, t.first + i) for t in turns for i in range(t.count)]


def published(num_targets: list[int], group: int, chunks: Chunks) -> list[Group]:
    return list(published_schedule(num_targets, [n + 1 for n in num_targets], group, chunks))


def check_turns(steps: Iterable[Sequence[Turn]], num_targets: Sequence[int]) -> None:
    """One turn a lane and step; a document stays in its lane and ends with its last turn."""
    places: dict[int, tuple[int, int]] = {}
    for step in steps:
        assert step
        lanes = [turn.lane for turn in step]
        assert lanes == sorted(set(lanes))
        for turn in step:
            lane, done = places.get(turn.document, (turn.lane, 0))
            assert (turn.lane, turn.first) == (lane, done)
            assert turn.count > 0
            done += turn.count
            assert turn.is_last == (done == num_targets[turn.document])
            places[turn.document] = (lane, done)


def test_sizes_of_short_documents_and_places() -> None:
    chunks = Chunks()
    lengths = (2, 256, 257, 2000, 2001, 97_000)
    assert [chunks.by_length(length) for length in lengths] == [8, 8, 24, 24, 48, 48]
    places = (0, 255, 256, 1999, 2000, 97_000)
    assert [chunks.by_position(place) for place in places] == [8, 8, 24, 24, 48, 48]


def test_entries_may_come_in_any_order_or_not_at_all() -> None:
    chunks = Chunks(48, ("2000:24", "256:8"))
    assert [chunks.by_length(n) for n in (256, 257, 2001)] == [8, 24, 48]
    assert Chunks(7, ()).by_length(1) == Chunks(7, ()).by_position(0) == 7


@pytest.mark.parametrize(
    "text", ["", "256", "256:", "256:0", "0:8", "-1:8", "a:8", "1:2:3", "8:\u0663"]
)
def test_bad_entries_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="expected 'limit:size'") as caught:
        Chunks(48, ("2000:24", text))
    assert repr(text) in str(caught.value)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(RecipeError, match="chunk = 0"):
        Chunks(0)
    with pytest.raises(RecipeError, match="occurs twice"):
        Chunks(48, ("256:8", "256:9"))
    with pytest.raises(RecipeError, match="lanes = 0"):
        next(stream_schedule([3], 0, SMALL))
    with pytest.raises(RecipeError, match="group = 0"):
        next(published_schedule([3], [4], 0, SMALL))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), SIZES)
def test_stream_prices_every_target_once(lengths: list[int], lanes: int, chunks: Chunks) -> None:
    steps = list(stream_schedule(lengths, lanes, chunks))
    assert sorted(priced(steps)) == [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    check_turns(steps, lengths)
    for turn in itertools.chain.from_iterable(steps):
        assert turn.lane < lanes
        size = chunks.by_position(turn.first)
        assert turn.count == size or (turn.is_last and turn.count < size)


def test_one_lane_follows_the_file() -> None:
    lengths = [3, 30, 1, 12]
    order = priced(stream_schedule(lengths, 1, SMALL))
    assert order == [(d, i) for d, n in enumerate(lengths) for i in range(n)]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_free_lanes_take_the_next_document_at_once(lengths: list[int], lanes: int) -> None:
    steps = list(stream_schedule(lengths, lanes, SMALL))
    begun = [t.document for step in steps for t in step if t.first == 0]
    assert begun == list(range(len(lengths)))
    waiting = len(lengths)
    for before, step in itertools.pairwise([[], *steps]):
        free = {t.lane for t in before if t.is_last} if before else set(range(lanes))
        taken = [t.lane for t in step if t.first == 0]
        assert taken == sorted(free)[:waiting]
        waiting -= len(taken)


def test_lanes_that_end_at_once_take_documents_by_lane() -> None:
    steps = list(stream_schedule([2, 9, 2, 1, 1, 1], 3, SMALL))
    assert [[(t.lane, t.document) for t in step] for step in steps[:3]] == [
        [(0, 0), (1, 1), (2, 2)],
        [(0, 3), (1, 1), (2, 4)],
        [(0, 5), (1, 1)],
    ]
    assert [[t.lane for t in step] for step in steps[3:]] == [[1], [1]]


def test_a_last_document_without_targets_has_no_turn() -> None:
    assert priced(stream_schedule([2, 0], 2, SMALL)) == [(0, 0), (0, 1)]
    assert list(stream_schedule([], 2, SMALL)) == []


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 5), SIZES)
def test_lengths_not_yet_known_move_no_earlier_turn(
    data: st.DataObject, lengths: list[int], lanes: int, chunks: Chunks
) -> None:
    steps = list(stream_schedule(lengths, lanes, chunks))
    cut = data.draw(st.integers(0, len(steps)))
    seen = list(itertools.chain.from_iterable(steps[:cut]))
    ended = {t.document for t in seen if t.is_last}
    done = {t.document: t.first + t.count for t in seen}
    other = [
        n if d in ended else done.get(d, 0) + data.draw(st.integers(1, 60))
        for d, n in enumerate(lengths)
    ]
    assert list(itertools.islice(stream_schedule(other, lanes, chunks), cut)) == steps[:cut]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), SIZES)
def test_published_prices_every_target_once(lengths: list[int], size: int, chunks: Chunks) -> None:
    groups = published(lengths, size, chunks)
    assert sorted(d for g in groups for d in g.documents) == list(range(len(lengths)))
    steps = [step for g in groups for step in g.steps]
    assert sorted(priced(steps)) == [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    for group in groups:
        check_turns(group.steps, lengths)
        assert group.chunk == chunks.by_length(max(lengths[d] for d in group.documents) + 1)
        for index, step in enumerate(group.steps):
            assert all(group.documents[t.lane] == t.document for t in step)
            assert all(t.first == index * group.chunk for t in step)
        for document in group.documents:
            turns = [t for step in group.steps for t in step if t.document == document]
            # An update follows every turn but the last.
            num_updates = sum(not t.is_last for t in turns)
            assert num_updates == -(-lengths[document] // group.chunk) - 1


def test_published_order() -> None:
    groups = published([30, 3, 30, 7, 3], 2, SMALL)
    assert [g.documents for g in groups] == [(3, 0), (2,), (1, 4)]
    assert [g.chunk for g in groups] == [9, 9, 2]
    assert groups[2].steps == (
        (Turn(0, 1, 0, 2, False), Turn(1, 4, 0, 2, False)),
        (Turn(0, 1, 2, 1, True), Turn(1, 4, 2, 1, True)),
    )


def test_the_published_batches() -> None:
    groups = published(list(range(50_000, 0, -1)), 24, Chunks(100_000, ()))
    assert len(groups) == 2084
    assert groups[0].documents == tuple(range(7, -1, -1))
    assert {len(g.documents) for g in groups[1:]} == {24}
    assert [g.documents[-1] for g in groups] == sorted(g.documents[-1] for g in groups)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 12), st.integers(0, 40))
def test_windows_of_a_document(total: int, chunk: int, extra: int) -> None:
    context = chunk + extra
    ends = []
    for group in published([total], 1, Chunks(chunk, ())):
        for (turn,) in group.steps:
            start, length, offset = published_window(turn.first, turn.count, chunk, context)
            assert offset >= 0
            assert offset + turn.count == length <= context
            assert start + offset == turn.first
            # As much context as there is.
            assert start == 0 or length == context
            ends.append(start + length)
    assert ends == [*range(chunk, total, chunk), total]


def test_published_window_formula() -> None:
    assert published_window(96, 48, 48, 3072) == (0, 144, 96)
    assert published_window(3072, 48, 48, 3072) == (48, 3072, 3024)
    assert published_window(3072, 10, 48, 3072) == (10, 3072, 3062)
    with pytest.raises(RecipeError, match="chunk = 48: expected at most the context, 32"):
        published_window(0, 8, 48, 32)
