"""Orders: every piece once an epoch, targets from the piece's own text, a function of the seed."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.data.order import Order, make_order
from underpar.data.shards import Shard
from underpar.errors import DataError, RecipeError

# Every token but the BOS is different, so a stream tells where in the shard it lies.
LENGTHS = [3, 1, 17, 40, 2, 9, 25, 1, 64, 5]
NAMES = ["documents", "sequences"]


def make_shard(lengths: list[int]) -> Shard:
    """Documents of so many tokens after their BOS."""
    next_id = itertools.count(2)
    docs = [[1, *itertools.islice(next_id, length)] for length in lengths]
    counts = np.array([len(doc) for doc in docs], dtype=np.int64)
    return Shard(
        tokens=np.array([*itertools.chain(*docs)], dtype=np.uint16),
        starts=np.cumsum(counts) - counts,
        doc_bytes=counts,
        doc_hashes=np.zeros((len(docs), 32), dtype=np.uint8),
        flags=np.zeros(len(docs), dtype=np.uint8),
    )


@pytest.fixture(scope="module")
def shard() -> Shard:
    return make_shard(LENGTHS)


def windows_of(order: Order, epoch: int, window_tokens: int) -> list[tuple[int, ...]]:
    total = order.epoch_tokens
    inputs = order.span(epoch * total, (epoch + 1) * total).inputs
    return [tuple(row.tolist()) for row in inputs.reshape(-1, window_tokens)]


def documents_of(order: Order, epoch: int) -> list[tuple[int, ...]]:
    total = order.epoch_tokens
    inputs = order.span(epoch * total, (epoch + 1) * total).inputs
    bounds = [*np.flatnonzero(inputs == 1).tolist(), len(inputs)]
    return [tuple(inputs[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def test_an_epoch_holds_every_document_once(shard: Shard) -> None:
    order = make_order("documents", shard, 3, 16)
    assert order.epoch_tokens == shard.num_tokens
    wanted = sorted(tuple(shard.doc(i).tolist()) for i in range(shard.num_documents))
    epochs = [documents_of(order, epoch) for epoch in range(3)]
    assert all(sorted(epoch) == wanted for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 40), st.integers(1, 130), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_window_once(
    window_tokens: int, more: int, seed: int, epoch: int
) -> None:
    shard = make_shard([window_tokens + more - 1])
    order = make_order("sequences", shard, seed, window_tokens)
    # With one document, the text of each window says where it lies.
    text = [1, *range(2, 2 + shard.num_tokens - 1)]
    windows = windows_of(order, epoch, window_tokens)
    firsts = sorted(text.index(window[0]) for window in windows)
    phase = firsts[0]
    assert 0 <= phase < window_tokens
    assert firsts == [phase + i * window_tokens for i in range(len(windows))]
    assert all(tuple(text[f : f + window_tokens]) in set(windows) for f in firsts)
    # The last window has a target for its last input, and little of the shard is left out.
    assert firsts[-1] + window_tokens < shard.num_tokens
    assert shard.num_tokens - len(windows) * window_tokens < 2 * window_tokens


def test_each_epoch_has_a_phase_and_an_order_of_its_own() -> None:
    order = make_order("sequences", make_shard([399]), 0, 16)
    firsts = [[w[0] for w in windows_of(order, epoch, 16)] for epoch in range(8)]
    assert len({min(f) for f in firsts}) > 3
    assert len({tuple(np.argsort(f).tolist()) for f in firsts}) == 8
    assert all(f != sorted(f) for f in firsts)


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_the_next_tokens_of_the_text(shard: Shard, name: str) -> None:
    order = make_order(name, shard, 1, 12)
    span = order.span(0, 2 * order.epoch_tokens)
    follower = dict(itertools.pairwise(shard.tokens.tolist()))
    follower[int(shard.tokens[-1])] = 1
    # What follows a BOS depends on the document, so those are checked by the shift below.
    unique = span.inputs != 1
    assert span.targets[unique].tolist() == [follower[t] for t in span.inputs[unique].tolist()]
    inside = ~span.is_start[1:]
    assert np.array_equal(span.targets[:-1][inside], span.inputs[1:][inside])
    assert span.inputs.dtype == span.targets.dtype == np.int64


def test_documents_follow_each_other_without_a_gap(shard: Shard) -> None:
    span = make_order("documents", shard, 4, 16).span(5, 3 * shard.num_tokens)
    assert np.array_equal(span.targets[:-1], span.inputs[1:])
    assert np.array_equal(span.is_start, span.inputs == 1)


def test_sequences_start_at_windows_and_hold_whole_documents(shard: Shard) -> None:
    order = make_order("sequences", shard, 2, 16)
    span = order.span(0, order.epoch_tokens)
    is_window = np.arange(order.epoch_tokens) % 16 == 0
    assert np.array_equal(span.is_start, is_window)
    assert (span.inputs[is_window] != 1).any(), "no window begins inside a document"
    assert (span.inputs[~is_window] == 1).any(), "no document begins inside a window"


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.integers(0, 900), st.integers(1, 300), st.integers(1, 300))
def test_a_span_does_not_depend_on_how_it_is_cut(
    shard: Shard, name: str, begin: int, first: int, second: int
) -> None:
    order = make_order(name, shard, 5, 16)
    middle, end = begin + first, begin + first + second
    whole = order.span(begin, end)
    parts = (
        make_order(name, shard, 5, 16).span(begin, middle),
        make_order(name, shard, 5, 16).span(middle, end),
    )
    for field, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert np.array_equal(field, np.concatenate(pieces))


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_the_order(shard: Shard, name: str) -> None:
    spans = [make_order(name, shard, seed, 8).span(0, 100).inputs for seed in range(5)]
    assert len({tuple(inputs.tolist()) for inputs in spans}) == 5


def test_the_orders_are_the_same_in_every_version(shard: Shard) -> None:
    # A new numpy or a rewrite must not silently change what a seed means.
    index_of = {tuple(shard.doc(i).tolist()): i for i in range(shard.num_documents)}
    docs = documents_of(make_order("documents", shard, 0, 16), 0)
    assert [index_of[doc] for doc in docs] == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    where = {token: place for place, token in enumerate(shard.tokens.tolist()) if token != 1}
    windows = windows_of(make_order("sequences", shard, 0, 20), 0, 20)
    assert [where[window[5]] - 5 for window in windows] == [51, 31, 11, 111, 131, 71, 91]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 70), st.integers(0, 3), st.integers(0, 2))
def test_long_documents_are_read_in_shuffled_pieces(
    shard: Shard, piece_tokens: int, seed: int, epoch: int
) -> None:
    order, total = make_order("documents", shard, seed, 16, piece_tokens), shard.num_tokens
    assert order.epoch_tokens == total
    inputs, targets, is_start = order.span(epoch * total, (epoch + 1) * total)
    firsts = [*np.flatnonzero(is_start).tolist(), total]
    pieces = [tuple(inputs[a:b].tolist()) for a, b in itertools.pairwise(firsts)]
    documents = [shard.doc(i).tolist() for i in range(shard.num_documents)]
    cuts = [
        tuple(doc[a : a + piece_tokens])
        for doc in documents
        for a in range(0, len(doc), piece_tokens)
    ]
    assert sorted(pieces) == sorted(cuts)
    # The last target of a piece is the next token of its document, and not of the next piece.
    follower = dict(itertools.pairwise(shard.tokens.tolist()))
    ends = [b - 1 for b in firsts[1:] if inputs[b - 1] not in (1, shard.tokens[-1])]
    assert [targets[e] for e in ends] == [follower[int(inputs[e])] for e in ends]


def test_short_documents_are_read_as_if_nothing_was_cut(shard: Shard) -> None:
    whole, cut = (make_order("documents", shard, 7, 16, piece) for piece in (0, 65))
    for a, b in zip(whole.span(0, 999), cut.span(0, 999), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"name": "shards"}, RecipeError, "order is 'shards', expected 'documents' or 'sequences'"),
        ({"seed": -1}, RecipeError, "seed is -1, expected 0 or more"),
        ({"window_tokens": 177}, DataError, "has 177 tokens, sequences of 177 need at least one"),
    ],
)
def test_bad_settings_are_refused(
    shard: Shard, changed: dict[str, object], error: type[Exception], message: str
) -> None:
    values: dict[str, object] = {"name": "sequences", "seed": 0, "window_tokens": 8}
    with pytest.raises(error, match=message) as caught:
        make_order(shard=shard, **(values | changed))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_shard_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="shard is empty"):
        make_order(name, make_shard([]), 0, 8)
