"""Scores: sums, not means; merging by addition; files whose totals must agree."""

import pytest

from underpar.errors import RuleError
from underpar.score.ledger import Entry, Score, score_from_dict

ENTRIES = [Entry(0, 80.0, 10, 4), Entry(1, 10.0, 20, 8), Entry(2, 6.0, 2, 1)]


def test_bits_per_byte_divides_sums() -> None:
    score = Score("plain", ENTRIES)
    assert score.bpb == 96 / 32
    assert (score.num_targets, score.num_bytes) == (13, 32)


@pytest.mark.parametrize("cut", [1, 2])
def test_ranks_merge_by_addition(cut: int) -> None:
    whole = Score("plain", ENTRIES, {"score": 2.0})
    parts = Score("plain", ENTRIES[cut:], {"score": 2.0}) + Score("plain", ENTRIES[:cut])
    assert parts.entries == whole.entries
    assert parts.bpb == whole.bpb


def test_a_document_scored_twice_is_refused() -> None:
    with pytest.raises(RuleError, match="twice"):
        Score("plain", ENTRIES) + Score("plain", ENTRIES[:1])


def test_methods_do_not_mix() -> None:
    with pytest.raises(RuleError, match="'adapt'"):
        Score("plain", ENTRIES[:1]) + Score("adapt", ENTRIES[1:])


def test_files_come_back_and_totals_must_agree() -> None:
    score = Score("plain", ENTRIES, {"score": 1.0}, [("price", 0, 2)])
    tree = score.as_dict()
    assert score_from_dict(tree) == score
    with pytest.raises(RuleError, match="totals differ"):
        score_from_dict(tree | {"bits": 90.0})
    with pytest.raises(RuleError, match="not a score file"):
        score_from_dict({"bits": 1})
