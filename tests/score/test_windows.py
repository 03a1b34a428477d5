"""Chunks: a partition in order, each as short as a decoder could know. Windows: one owner each."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from underpar.data.batch import pack_documents
from underpar.errors import RecipeError
from underpar.score.windows import (
    STREAM,
    Window,
    chunk_documents,
    flat_windows,
    group_windows,
    isolated_windows,
    sliding_windows,
)


def owned_targets(windows: list[Window]) -> list[int]:
    """Targets from 1 on, as the windows own them."""
    return [w.start + j + 1 for w in windows for j in range(w.owned, w.length)]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 80))
def test_chunks_partition_the_stream(lengths: list[int], size: int) -> None:
    chunks = list(chunk_documents(lengths, size))
    assert [i for chunk in chunks for i in chunk] == list(range(len(lengths)))
    for chunk in chunks[:-1]:
        total = sum(lengths[i] for i in chunk)
        assert total >= size
        assert total - lengths[chunk[-1]] < size


@given(st.lists(st.integers(1, 50), min_size=2, max_size=30), st.integers(1, 80))
def test_later_documents_do_not_move_earlier_borders(lengths: list[int], size: int) -> None:
    chunks = list(chunk_documents(lengths, size))
    other = list(chunk_documents([*lengths[:-1], lengths[-1] + 7], size))
    assert [c for c in chunks if c.stop < len(lengths)] == [
        c for c in other if c.stop < len(lengths)
    ]


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 40), st.data())
def test_owned_targets_tile(num_targets: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    windows = sliding_windows(num_targets, context, stride)
    assert owned_targets(windows) == list(range(1, num_targets + 1))
    for index, window in enumerate(windows):
        assert window.document == STREAM
        assert window.start == index * stride
        assert window.length == min(context, num_targets - window.start)
        assert window.owned == (context - stride if index else 0)


@pytest.mark.parametrize(
    ("num_targets", "context", "stride", "expected"),
    [
        (10, 4, 2, [(0, 4, 0), (2, 4, 2), (4, 4, 2), (6, 4, 2)]),
        (11, 4, 3, [(0, 4, 0), (3, 4, 1), (6, 4, 1), (9, 2, 1)]),
        (3, 4, 2, [(0, 3, 0)]),
        (4, 4, 1, [(0, 4, 0)]),
        (5, 4, 1, [(0, 4, 0), (1, 4, 3)]),
        (1, 4, 4, [(0, 1, 0)]),
    ],
)
def test_windows_by_hand(
    num_targets: int, context: int, stride: int, expected: list[tuple[int, int, int]]
) -> None:
    windows = sliding_windows(num_targets, context, stride)
    assert [(w.start, w.length, w.owned) for w in windows] == expected


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 30))
def test_a_stride_of_one_truncates_the_context_of_each_target(
    num_targets: int, context: int
) -> None:
    windows = sliding_windows(num_targets, context, 1)
    sees = [j + 1 for w in windows for j in range(w.owned, w.length)]
    assert sees == [min(target, context) for target in owned_targets(windows)]
    assert len(sees) == num_targets


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 12))
@example([12, 13], 12)
def test_a_stride_of_the_context_gives_the_plain_pieces(lengths: list[int], context: int) -> None:
    batch, owner = pack_documents([np.ones(n, dtype=np.uint16) for n in lengths], 1, context)
    windows = list(isolated_windows(lengths, context, context))
    assert all(w.owned == 0 for w in windows)
    firsts = np.cumsum([0, *lengths])
    starts = [int(firsts[w.document]) + w.start for w in windows]
    assert [*starts, len(owner)] == np.unique(batch.segments.cu.numpy()).tolist()
    assert [w.document for w in windows] == owner[starts].tolist()
    assert sum(w.length for w in windows) == len(owner)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 20), st.data())
def test_isolated_and_flat(lengths: list[int], context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    isolated = list(isolated_windows(lengths, context, stride))
    assert [w.document for w in isolated] == sorted(w.document for w in isolated)
    for document, total in enumerate(lengths):
        windows = [w for w in isolated if w.document == document]
        assert windows == sliding_windows(total, context, stride, document)
    flat = list(flat_windows(lengths, context, stride))
    assert owned_targets(flat) == list(range(1, sum(lengths) + 1))
    assert {w.document for w in flat} <= {STREAM}


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=12), st.integers(1, 60))
def test_groups_are_full_passes(lengths: list[int], batch_tokens: int) -> None:
    windows = list(isolated_windows(lengths, 8, 3))
    groups = list(group_windows(iter(windows), batch_tokens))
    assert [w for group in groups for w in group] == windows
    for index, group in enumerate(groups):
        total = sum(w.length for w in group)
        assert total <= batch_tokens or len(group) == 1
        if index + 1 < len(groups):
            assert total + groups[index + 1][0].length > batch_tokens


@pytest.mark.parametrize("stride", [0, -1, 9])
def test_a_stride_outside_the_context_is_refused(stride: int) -> None:
    with pytest.raises(RecipeError, match=f"stride = {stride}: expected from 1 to the context, 8"):
        sliding_windows(100, 8, stride)
