"""FlexAttention's blocks against the mask over all pairs of tokens."""

import shutil
from itertools import accumulate

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from underpar.kernels.attention.backend import Pieces
from underpar.kernels.attention.flex import attend_blocks, block_mask, block_tables, starts_of
from underpar.kernels.attention.reference import attend_by_definition, band


def dense_mask(lengths: list[int], window: int) -> Tensor:
    mask = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        piece = slice(end - length, end)
        mask[piece, piece] = band(length, window, mask.device)
    return mask


def cuts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    st.sampled_from([0, 1, 7, 8, 9, 30]),
)
def test_blocks_are_those_of_the_dense_mask(lengths: list[int], window: int) -> None:
    block = 8
    num = sum(lengths)
    partial, full = block_tables(starts_of(cuts(lengths), num), window, block)
    dense = dense_mask(lengths, window)
    for i in range(len(partial)):
        for j in range(len(partial)):
            cells = dense[i * block : (i + 1) * block, j * block : (j + 1) * block]
            assert bool(partial[i, j] | full[i, j]) == bool(cells.any())
            # The mask is not read in a full block. On the diagonal none is full.
            assert bool(full[i, j]) == (bool(cells.all()) and j < i)
    assert not (partial & full).any()


@pytest.mark.parametrize("window", [0, 150])
def test_the_mask_names_blocks_and_cells(window: int) -> None:
    lengths = [300, 0, 1, 512, 90]
    num = sum(lengths)
    mask = block_mask(cuts(lengths), num, window)
    query, key = torch.arange(num)[:, None], torch.arange(num)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, query, key), dense_mask(lengths, window))
    partial, full = block_tables(starts_of(cuts(lengths), num), window)
    assert torch.equal(mask.to_dense()[0, 0].bool(), partial | full)
    assert torch.equal(mask.full_kv_num_blocks[0, 0], full.sum(1))
    for i, count in enumerate(mask.kv_num_blocks[0, 0].tolist()):
        visited = mask.kv_indices[0, 0, i, :count].tolist()
        assert visited == partial[i].nonzero()[:, 0].tolist()


def test_the_start_of_a_token_skips_empty_pieces() -> None:
    starts = starts_of(cuts([0, 0, 2, 0, 0, 3, 0]), 5)
    assert starts.tolist() == [0, 0, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@torch.no_grad()
def test_the_kernel_of_a_cpu_agrees_and_compiles_once() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    first = [300, 0, 1, 512, 90]
    for lengths in (first, first[::-1], [64, 100, 500, 1, 0, 0, 238]):
        q, k, v = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
        pieces = Pieces(cuts(lengths), 512, 150)
        with torch._dynamo.config.patch(error_on_recompile=True):
            out = attend_blocks(q, k, v, pieces)
        expected = attend_by_definition(q, k, v, pieces)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
