"""Packs: segments by the rule, padding that changes nothing, documents scored by themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.data.batch import pack_documents, segments_from_starts


def slow_segments(starts: set[int], num_tokens: int, context: int) -> tuple[list[int], list[int]]:
    cu: list[int] = []
    positions: list[int] = []
    for i in range(num_tokens):
        if i == 0 or i in starts or positions[-1] + 1 == context:
            cu.append(i)
        positions.append(i - cu[-1])
    return [*cu, num_tokens], positions


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 60), st.integers(1, 70), st.data())
def test_segments_follow_the_rule(num_tokens: int, context: int, data: st.DataObject) -> None:
    starts = data.draw(st.sets(st.integers(0, num_tokens - 1)))
    mask = np.isin(np.arange(num_tokens), list(starts))
    cu, positions = slow_segments(starts, num_tokens, context)
    for given_starts in (mask, np.array(sorted(starts), dtype=np.int64)):
        segments = segments_from_starts(given_starts, num_tokens, context)
        assert segments.cu.tolist() == cu and segments.cu.dtype == torch.int32
        assert segments.positions.tolist() == positions
        assert segments.positions.dtype == torch.int64
        assert max(positions) < segments.max_len == min(context, num_tokens)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 9), st.data())
def test_padding_adds_empty_segments_only(
    num_tokens: int, context: int, cu_bucket: int, data: st.DataObject
) -> None:
    starts = np.array(data.draw(st.lists(st.integers(0, num_tokens - 1))), dtype=np.int64)
    plain = segments_from_starts(starts, num_tokens, context)
    padded = segments_from_starts(starts, num_tokens, context, cu_bucket)
    added = padded.cu[len(plain.cu) :]
    assert torch.equal(padded.cu[: len(plain.cu)], plain.cu) and padded.cu.dtype == torch.int32
    assert torch.equal(padded.positions, plain.positions) and padded.max_len == plain.max_len
    assert (added == num_tokens).all() and len(added) < max(1, cu_bucket)
    assert len(padded.cu) % max(1, cu_bucket) == 0


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 9))
def test_packs_score_every_document_by_itself(lengths: list[int], context: int) -> None:
    docs = [np.array([1, *range(2, 2 + n)], dtype=np.uint16) for n in lengths]
    batch, owner = pack_documents(docs, 1, context)
    cuts = set(np.cumsum([0, *(len(doc) for doc in docs[:-1])]).tolist())
    cu, positions = slow_segments(cuts, len(batch.inputs), context)
    assert batch.segments.cu.tolist() == cu
    assert batch.segments.positions.tolist() == positions
    for index, doc in enumerate(docs):
        mine = torch.from_numpy(owner == index)
        assert batch.inputs[mine].tolist() == doc.tolist()
        assert batch.targets[mine].tolist() == [*doc[1:].tolist(), 1]
    assert len(owner) == sum(map(len, docs))


@pytest.mark.parametrize("docs", [[], [np.array([5, 6])], [np.array([], dtype=np.int64)]])
def test_packs_need_documents_that_start_with_bos(docs: list[np.ndarray]) -> None:
    with pytest.raises(AssertionError):
        pack_documents(docs, 1, 8)
