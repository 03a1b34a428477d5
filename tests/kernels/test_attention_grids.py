"""Padded grids, and that they are worked out once a batch."""

import gc
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from underpar.kernels.attention import attend, grids
from underpar.kernels.attention.grids import Pack
from underpar.kernels.attention.memo import Memo


def test_one_long_piece_does_not_pad_the_short_ones() -> None:
    lengths = [1000] + [10] * 100
    pack = Pack.from_boundaries(torch.tensor([0, *accumulate(lengths)]))
    assert sum(grid.numel() for grid, _ in pack.grids) == sum(lengths)
    assert torch.equal(
        torch.cat([g.flatten()[c] for g, c in pack.grids])[pack.order], torch.arange(2000)
    )


def test_layers_share_the_grids_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def count(cu: Tensor) -> Pack:
        made.append(cu.tolist())
        return original(cu)

    original = Pack.from_boundaries
    monkeypatch.setattr(grids.Pack, "from_boundaries", staticmethod(count))
    x = torch.randn(12, 2, 8, requires_grad=True)
    first, second = (torch.tensor(c, dtype=torch.int32) for c in ([0, 5, 12], [0, 12]))
    for cu in (first, second):
        y = x
        for _ in range(3):
            y = attend(y, y, y, cu, 12, backend="sdpa")
        y.sum().backward()
    assert made == [[0, 5, 12], [0, 12]]


def test_boundaries_changed_in_place_are_seen() -> None:
    x = torch.randn(12, 2, 8)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    before = attend(x, x, x, cu, 12, backend="sdpa")
    cu[1] = 8
    after = attend(x, x, x, cu, 12, backend="sdpa")
    fresh = attend(x, x, x, cu.clone(), 12, backend="sdpa")
    assert torch.equal(after, fresh) and not torch.equal(after, before)


def test_a_memo_forgets_with_the_boundaries() -> None:
    memo = Memo()
    cu = torch.tensor([0, 3])
    assert memo.recall(cu, "a", lambda: 1) == memo.recall(cu, "a", lambda: 2) == 1
    assert memo.recall(cu, "b", lambda: 2) == 2
    assert memo.recall(cu.clone(), "a", lambda: 3) == 3
    del cu
    gc.collect()
    assert len(memo._kept) == 0
