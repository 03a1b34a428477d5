"""The tokenizer's sample: the smallest hashes that fit, in any order, no document too long."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.data.sources.corpus import document_hash
from underpar.data.tokens import sample
from underpar.data.tokens.sample import sample_by_hash


def pairs(texts: list[str]) -> Iterator[tuple[bytes, str]]:
    return ((document_hash(text), text) for text in texts)


def test_the_sample_is_the_same_in_any_order() -> None:
    rng = np.random.default_rng(0)
    texts = [f"{i} " * int(rng.integers(1, 60)) for i in range(200)]
    chosen = sample_by_hash(pairs(texts), 5000)
    num_bytes = sum(len(text) for text in chosen)
    assert 5000 - 200 <= num_bytes <= 5000
    for _ in range(5):
        shuffled = [texts[i] for i in rng.permutation(len(texts))] + texts[:20]
        assert sample_by_hash(pairs(shuffled), 5000) == chosen


@settings(deadline=None, max_examples=50)
@given(
    texts=st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=12), max_size=12),
    cap_bytes=st.integers(0, 60),
)
def test_the_sample_is_a_prefix_of_the_sorted_hashes(texts: list[str], cap_bytes: int) -> None:
    by_hash = sorted(set(texts), key=document_hash)
    chosen = sample_by_hash(pairs(texts), cap_bytes)
    assert chosen == by_hash[: len(chosen)]
    assert sum(len(text.encode()) for text in chosen) <= cap_bytes
    if len(chosen) < len(by_hash):
        # The first document that was left out would not have fitted.
        longer = by_hash[: len(chosen) + 1]
        assert sum(len(text.encode()) for text in longer) > cap_bytes


def test_a_long_document_does_not_fill_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "CHARACTERS_PER_DOCUMENT", 10)
    assert sample_by_hash(pairs(["x" * 1000]), 100) == ["x" * 10]
    assert sample_by_hash(pairs(["\U0001f600" * 1000]), 40) == ["\U0001f600" * 10]
    assert sample_by_hash(pairs(["\U0001f600" * 1000]), 39) == []


def test_copies_count_once() -> None:
    assert sample_by_hash(pairs(["same"] * 50), 4) == ["same"]
