"""Packed attention against the plainest loop that can be written."""

import math
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from underpar.kernels.attention import Pack, attend_packed


def attend(q: Tensor, k: Tensor, v: Tensor, cu: list[int]) -> Tensor:
    return attend_packed(q, k, v, Pack.from_boundaries(torch.tensor(cu)))


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, cu: list[int]) -> Tensor:
    out = torch.empty_like(q)
    group = q.size(1) // k.size(1)
    for begin, end in pairwise(cu):
        for head in range(q.size(1)):
            keys, values = k[begin:end, head // group], v[begin:end, head // group]
            for i in range(end - begin):
                scores = keys[: i + 1] @ q[begin + i, head] / math.sqrt(q.size(2))
                out[begin + i, head] = scores.softmax(0) @ values[: i + 1]
    return out


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=4), st.sampled_from([(4, 2), (3, 3), (4, 1)])
)
def test_packed_equals_the_loop(lengths: list[int], heads: tuple[int, int]) -> None:
    torch.manual_seed(sum(lengths))
    cu = [0, *np.cumsum(lengths).tolist()]
    q = torch.randn(cu[-1], heads[0], 6)
    k, v = torch.randn(2, cu[-1], heads[1], 6)
    out = attend(q, k, v, cu)
    torch.testing.assert_close(out, attend_slowly(q, k, v, cu), rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 64))
def test_empty_pieces_change_nothing(lengths: list[int], place: int, num_empty: int) -> None:
    torch.manual_seed(sum(lengths))
    cu = [0, *np.cumsum(lengths).tolist()]
    q, k, v = torch.randn(3, cu[-1], 2, 6)
    repeated = cu[min(place, len(cu) - 1)]
    for more in ([cu[-1]] * num_empty, [repeated] * num_empty):
        assert torch.equal(attend(q, k, v, sorted(cu + more)), attend(q, k, v, cu))


def test_gradients_equal_the_loop() -> None:
    cu = [0, 3, 8]
    q = torch.randn(8, 4, 6, requires_grad=True)
    k, v = (torch.randn(8, 2, 6, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, 4, 6)
    fast = torch.autograd.grad((attend(q, k, v, cu) * weight).sum(), (q, k, v))
    slow = torch.autograd.grad((attend_slowly(q, k, v, cu) * weight).sum(), (q, k, v))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_one_long_piece_does_not_pad_the_short_ones() -> None:
    lengths = [1000] + [10] * 100
    pack = Pack.from_boundaries(torch.tensor([0, *np.cumsum(lengths)]))
    assert sum(grid.numel() for grid, _ in pack.grids) == sum(lengths)
    assert torch.equal(
        torch.cat([g.flatten()[c] for g, c in pack.grids])[pack.order], torch.arange(2000)
    )
