"""Scores: sums, not means; files whose totals must agree."""

import json

import pytest

from underpar.errors import RuleError
from underpar.score.ledger import Entry, Score, score_from_dict

ENTRIES = [Entry(0, 80.0, 10, 4), Entry(1, 10.0, 20, 8), Entry(2, 6.0, 2, 1)]


def test_bits_per_byte_divides_sums() -> None:
    score = Score("plain", ENTRIES)
    assert score.bpb == 96 / 32
    assert (score.num_targets, score.num_bytes) == (13, 32)


def test_what_a_decoder_must_be_told_counts() -> None:
    score = Score("adapt", ENTRIES, stopped_at=1, side_bits=32.0)
    assert (score.bits, score.bpb) == (128, 4)
    assert score.as_dict()["bpb"] == 4


def test_files_come_back_and_totals_must_agree() -> None:
    score = Score(
        "lora_ttt+published",
        ENTRIES,
        {"score": 1.0},
        [("price", 0, 2)],
        order="published",
        stopped_at=7,
        side_bits=32.0,
        how={"levers": ["lora_ttt"], "settings": {"lora_ttt": {"rank": 8}}},
    )
    tree = json.loads(json.dumps(score.as_dict()))
    assert score_from_dict(tree) == score
    # Bits of the ledger that leave out what was told beside it.
    for changed in ({"bits": 90.0}, {"bits": 96.0}, {"side_bits": 0.0}, {"documents": 2}):
        with pytest.raises(RuleError, match="totals differ"):
            score_from_dict(tree | changed)


@pytest.mark.parametrize("missing", ["order", "stopped_at", "side_bits", "how", "ledger", "events"])
def test_a_file_without_all_parts_is_refused(missing: str) -> None:
    tree = Score("plain", ENTRIES).as_dict()
    del tree[missing]
    with pytest.raises(RuleError, match="not a score file"):
        score_from_dict(tree)
