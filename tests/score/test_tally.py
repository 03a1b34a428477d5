"""The tally: every target once and in order, whatever the way in which prices come."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lane_runs import make_shard
from underpar.errors import RuleError
from underpar.score.tally import Tally

# Four, three and, as nothing follows the last document, one target.
SHARD = make_shard([4, 3, 2])
NATS = np.arange(1.0, 9.0)


def test_bits_are_summed_by_document() -> None:
    commits = []
    tally = Tally(SHARD, lambda *commit: commits.append(commit))
    assert tally.expected.tolist() == [4, 3, 1]
    tally.commit(1, 0, NATS[:2])
    tally.commit(0, 0, NATS[2:6])
    tally.commit(1, 2, NATS[6:7])
    assert [tally.is_finished(document) for document in range(3)] == [True, True, False]
    assert tally.share == 7 / 8
    # Ten bytes a document, and none yet of the last.
    assert tally.bpb == pytest.approx(28 / math.log(2) / 20)
    tally.commit(2, 0, NATS[7:])
    entries = tally.entries()
    assert [entry.bits * math.log(2) for entry in entries] == pytest.approx([18, 10, 8])
    assert [entry.num_targets for entry in entries] == [4, 3, 1]
    assert [(entry.document, entry.num_bytes) for entry in entries] == [(0, 10), (1, 10), (2, 10)]
    assert [(document, first, nats.tolist()) for document, first, nats in commits] == [
        (1, 0, [1, 2]),
        (0, 0, [3, 4, 5, 6]),
        (1, 2, [7]),
        (2, 0, [8]),
    ]


def test_unfinished_documents_count_by_their_share() -> None:
    tally = Tally(SHARD)
    tally.commit(0, 0, NATS[:1])
    assert tally.bpb == pytest.approx(1 / math.log(2) / 2.5)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6), data=st.data())
def test_a_stream_is_cut_at_documents(lengths: list[int], data: st.DataObject) -> None:
    shard = make_shard(lengths)
    nats = np.random.default_rng(0).random(shard.num_tokens - 1)
    commits = []
    tally = Tally(shard, lambda *commit: commits.append(commit))
    first = 0
    while first < len(nats):
        end = data.draw(st.integers(first + 1, len(nats)))
        tally.commit_stream(first, nats[first:end])
        first = end
    places = [int(shard.starts[document]) + place for document, place, _ in commits]
    assert places == sorted(set(places))
    assert np.array_equal(np.concatenate([nats[:0], *(part for _, _, part in commits)]), nats)
    assert sum(entry.num_targets for entry in tally.entries()) == len(nats)


@pytest.mark.parametrize("first", [0, 2])
def test_a_target_that_is_not_the_next_is_refused(first: int) -> None:
    tally = Tally(SHARD)
    tally.commit(1, 0, NATS[:1])
    with pytest.raises(RuleError, match=f"document 1: target {first} was priced when 1 was the"):
        tally.commit(1, first, NATS[:1])
    with pytest.raises(RuleError, match="document 0: target 3"):
        tally.commit_stream(3, NATS[:1])


def test_prices_too_many_or_too_few_are_our_own_mistake() -> None:
    tally = Tally(SHARD)
    with pytest.raises(AssertionError, match="more prices"):
        tally.commit_stream(0, np.ones(9))
    with pytest.raises(AssertionError, match="missed"):
        Tally(SHARD).entries()


def test_notes_keep_their_order() -> None:
    tally = Tally(SHARD)
    tally.note("price", 0, 4)
    tally.note("adapt", 0, 3)
    assert tally.events == [("price", 0, 4), ("adapt", 0, 3)]
