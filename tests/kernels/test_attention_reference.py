"""The definition of packed attention against the plainest loop that can be written."""

import math
from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from underpar.kernels.attention import attend
from underpar.kernels.attention.reference import band


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, cu: list[int], window: int) -> Tensor:
    out = torch.empty_like(q)
    group = q.size(1) // k.size(1)
    for begin, end in pairwise(cu):
        for head in range(q.size(1)):
            for i in range(begin, end):
                first = max(begin, i - window) if window else begin
                keys, values = (t[first : i + 1, head // group] for t in (k, v))
                scores = keys @ q[i, head] / math.sqrt(q.size(2))
                out[i, head] = scores.softmax(0) @ values
    return out


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 24), min_size=1, max_size=4).filter(any),
    st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    st.sampled_from([0, 1, 2, 7, 100]),
)
def test_the_definition_equals_the_loop(
    lengths: list[int], heads: tuple[int, int], window: int
) -> None:
    torch.manual_seed(sum(lengths))
    cu = [0, *accumulate(lengths)]
    q = torch.randn(cu[-1], heads[0], 6, dtype=torch.float64)
    k, v = torch.randn(2, cu[-1], heads[1], 6, dtype=torch.float64)
    cuts = torch.tensor(cu, dtype=torch.int32)
    out = attend(q, k, v, cuts, max(lengths), window, "reference")
    torch.testing.assert_close(out, attend_slowly(q, k, v, cu, window))


def test_halves_are_computed_in_single_precision() -> None:
    torch.manual_seed(0)
    cu = torch.tensor([0, 40], dtype=torch.int32)
    q, k, v = torch.randn(3, 40, 2, 16).bfloat16()
    out = attend(q, k, v, cu, 40, backend="reference")
    exact = attend(q.float(), k.float(), v.float(), cu, 40, backend="reference")
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())


def test_a_window_counts_the_tokens_before() -> None:
    seen = band(5, 2, torch.device("cpu"))
    assert seen.sum(1).tolist() == [1, 2, 3, 3, 3]
    assert seen[4].tolist() == [False, False, True, True, True]
    assert band(5, 0, torch.device("cpu")).sum(1).tolist() == [1, 2, 3, 4, 5]
