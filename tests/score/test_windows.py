"""Chunks: a partition in order, each as short as a decoder could know."""

from hypothesis import given
from hypothesis import strategies as st

from underpar.score.windows import chunk_documents


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
