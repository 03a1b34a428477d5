"""Attention of lanes: a plain loop's numbers, from torch and from tiles alike."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from underpar.kernels.lane_attention import Place, attend_lanes, reference

# Arrays of a step and its window -> outputs, logarithms of sums, gradients of q, k and v.
Tiles = Callable[[Sequence[np.ndarray], int], list[np.ndarray]]

TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@dataclass(frozen=True)
class Case:
    """Shapes of a step."""

    width: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    window: int = 0
    group: int = 2
    num_heads: int = 2  # of keys
    channels: int = 16

    @property
    def room(self) -> int:
        """Tokens a lane in the cache, padding that nobody needs not counted."""
        return 1 + max(map(sum, zip(self.starts, self.counts, strict=True)))


@dataclass(frozen=True, eq=False)
class Step:
    """Tensors of a step."""

    q: Tensor  # (N, H, D)
    k: Tensor  # (N, K, D)
    v: Tensor
    cache: Tensor  # (2, L, room, K, D)
    place: Place
    grad: Tensor  # (N, H, D) of the outputs; nothing where there is padding

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def real(self) -> Tensor:
        """(N,), false where there is padding."""
        width = len(self.q) // len(self.place.counts)
        return (torch.arange(width) < self.place.counts[:, None]).flatten()


def draw(case: Case, dtype: torch.dtype = torch.float32) -> Step:
    torch.manual_seed(case.width)
    num_lanes = len(case.starts)
    kept = (case.num_heads, case.channels)
    num, num_heads = num_lanes * case.width, case.num_heads * case.group
    q, grad = (torch.randn(num, num_heads, case.channels, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(num, *kept, dtype=dtype) for _ in range(2))
    cache = torch.randn(2, num_lanes, case.room, *kept, dtype=dtype)
    place = Place(torch.tensor(case.starts), torch.tensor(case.counts))
    step = Step(*(t.requires_grad_() for t in (q, k, v)), cache, place, grad)
    grad[~step.real] = 0
    return step


def attend(step: Step, window: int) -> Tensor:
    return attend_lanes(*step.leaves, step.cache, step.place, window)


def gradients(step: Step, out: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, step.leaves, step.grad)


def attend_one_by_one(step: Step, window: int) -> tuple[Tensor, Tensor]:
    """Outputs (N, H, D) and the logarithm of each query's sum (N, H), zeros for padding."""
    num_lanes = len(step.place.starts)
    q, k, v = (t.unflatten(0, (num_lanes, -1)) for t in step.leaves)
    group = q.size(2) // k.size(2)
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3])
    pairs = zip(step.place.starts.tolist(), step.place.counts.tolist(), strict=True)
    for lane, (start, count) in enumerate(pairs):
        whole = [
            torch.cat((kept[lane, :start], new[lane, :count])).repeat_interleave(group, dim=1)
            for kept, new in zip(step.cache, (k, v), strict=True)
        ]
        for token in range(count):
            end = start + token + 1
            first = max(0, end - window - 1) if window else 0
            keys, values = (t[first:end] for t in whole)  # (T, H, D)
            scores = torch.einsum("hd,thd->ht", q[lane, token], keys) / q.size(-1) ** 0.5
            out[lane, token] = torch.einsum("ht,thd->hd", scores.softmax(1), values)
            lse[lane, token] = scores.logsumexp(1)
    return out.flatten(0, 1), lse.flatten(0, 1)


CASES = [
    Case(1, (0,), (1,), group=1),
    Case(1, (70, 0, 5), (1, 1, 0), window=7, channels=64),
    Case(5, (0, 17, 11), (5, 2, 0), window=7, group=3, num_heads=1, channels=32),
    Case(8, (0, 130, 63), (8, 8, 1), group=1, channels=64),
    Case(8, (3, 0, 64), (0, 8, 5), window=20),
    Case(50, (0, 17, 0), (50, 47, 0), channels=32),
    Case(50, (100, 14), (31, 50), window=7, group=3, num_heads=1),
    Case(80, (130, 0), (80, 66), window=20),
    Case(80, (65, 200), (64, 80), group=3, num_heads=1),
]
STEPS = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.width}-{case.window}")


@st.composite
def make_cases(draw: st.DrawFn, widths: list[int]) -> Case:
    width = draw(st.sampled_from(widths))
    lane = st.tuples(st.integers(0, 150), st.integers(0, width))
    starts, counts = zip(*draw(st.lists(lane, min_size=1, max_size=3)), strict=True)
    kinds = ([0, 1, 7, 20, 64], [1, 2, 3], [1, 2], [16, 32, 64])
    return Case(width, starts, counts, *(draw(st.sampled_from(values)) for values in kinds))


def check_reference(case: Case) -> None:
    step = draw(case, torch.float64)
    wanted = attend_one_by_one(step, case.window)[0]
    # A step whose lanes all rest has no gradient.
    exact = gradients(step, wanted + 0 * sum(t.sum() for t in step.leaves))
    out = attend(step, case.window)
    assert out.isfinite().all()
    torch.testing.assert_close(out[step.real], wanted[step.real], rtol=0, atol=1e-12)
    for actual, expected in zip(gradients(step, out), exact, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        assert not actual[~step.real].any()


@STEPS
def test_lanes_attend_as_a_plain_loop_does(case: Case) -> None:
    check_reference(case)


@settings(max_examples=10, deadline=None)
@given(make_cases([1, 2, 7, 20]))
def test_any_lanes_attend_as_a_plain_loop_does(case: Case) -> None:
    check_reference(case)


@STEPS
def test_padding_changes_nothing(case: Case) -> None:
    one, other = draw(case), draw(case)
    with torch.no_grad():
        for tensor in other.leaves:
            tensor[~other.real] = 77.0
    actual, wanted = (attend(step, case.window) for step in (other, one))
    assert torch.equal(actual[one.real], wanted[one.real])
    for a, b in zip(gradients(other, actual), gradients(one, wanted), strict=True):
        assert torch.equal(a, b)


@STEPS
def test_the_cache_has_the_step_behind_what_it_kept(case: Case) -> None:
    step = draw(case)
    before = step.cache.clone()
    first = attend(step, case.window)
    for kept, new, old in zip(step.cache, (step.k, step.v), before, strict=True):
        rows = new.unflatten(0, (len(case.starts), -1))
        for lane, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
            assert torch.equal(kept[lane, :start], old[lane, :start])
            assert torch.equal(kept[lane, start : start + count], rows[lane, :count])
            # Behind the step's padding nothing is written, but for the row that is never read.
            rest = slice(start + case.width, case.room - 1)
            assert torch.equal(kept[lane, rest], old[lane, rest])
    after = step.cache.clone()
    assert torch.equal(attend(step, case.window), first)
    # The last row is padding's, whichever.
    assert torch.equal(step.cache[:, :, :-1], after[:, :, :-1])


def test_gradients_stop_at_what_is_kept() -> None:
    parts = [Case(6, (0, 0), (6, 4)), Case(6, (6, 4), (6, 5))]
    first, second = (draw(case) for case in parts)
    cache = torch.zeros(2, 2, 13, 2, 16)
    attend_lanes(*first.leaves, cache, first.place)
    out = attend_lanes(*second.leaves, cache, second.place)
    grads = torch.autograd.grad(out, first.leaves + second.leaves, second.grad, allow_unused=True)
    assert grads[:3] == (None, None, None) and all(g is not None and g.any() for g in grads[3:])


def test_strided_inputs_and_an_expanded_gradient() -> None:
    case = Case(5, (0, 17), (5, 5))
    torch.manual_seed(0)
    packed = torch.randn(10, 8 * 16, requires_grad=True)

    def run(copy: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (t.unflatten(1, (-1, 16)) for t in packed.split((64, 32, 32), dim=1))
        if copy:
            q, k, v = (t.contiguous() for t in (q, k, v))
        step = draw(case)
        out = attend_lanes(q, k, v, step.cache, step.place)
        return out, torch.autograd.grad(out.sum(), packed)[0]

    for a, b in zip(run(copy=False), run(copy=True), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_does_not_reach_into_the_operator() -> None:
    step = draw(Case(5, (0, 17), (5, 2)))
    wanted = attend(step, 0)
    exact = gradients(step, wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(step, 0)
        grads = gradients(step, out)
    assert torch.equal(out, wanted)
    assert all(map(torch.equal, grads, exact))


def test_a_step_is_learnt_from_before_the_next_is_read() -> None:
    step = draw(Case(5, (0, 17), (5, 2)))
    out = attend(step, 0)
    attend(step, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(step, out)


def test_the_operator_is_well_registered() -> None:
    step = draw(Case(5, (0, 17), (5, 2)))
    rest = (step.cache, list(step.place), 7)
    forward = torch.ops.underpar.attend_lanes
    # The write to the cache is not declared: only a repeated one is as if there were none.
    saved = [t.detach() for t in (step.q, *forward(*step.leaves, *rest))]
    torch.library.opcheck(forward.default, (*step.leaves, *rest))
    backward = torch.ops.underpar.attend_lanes_backward.default
    torch.library.opcheck(backward, (step.grad, saved, *rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_are_known_without_numbers(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        q = torch.empty(6, 4, 16, dtype=dtype, requires_grad=True)
        k, v = (torch.empty(6, 2, 16, dtype=dtype, requires_grad=True) for _ in range(2))
        cache = torch.empty(2, 3, 40, 2, 16, dtype=dtype)
        place = Place(*(torch.zeros(3, dtype=torch.long) for _ in range(2)))
        out = attend_lanes(q, k, v, cache, place, 5)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, dtype) for t in (q, k, v)]


def run_tiles(arrays: Sequence[np.ndarray], window: int) -> list[np.ndarray]:
    """What the kernels make of q, a cache with the step in it, starts, counts and gradients."""
    from underpar.kernels.lane_attention import tiles

    q, cache, starts, counts, grad = map(torch.from_numpy, arrays)
    place = Place(starts, counts)
    out, lse = tiles.forward(q, cache, place, window)
    grads = tiles.backward(grad, [q, out, lse], cache, place, window)
    return [t.numpy() for t in (out, lse, *grads)]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Tiles]:
    """The kernels in a process of their own: an interpreter must be there before Triton is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            yield lambda arrays, window: pool.submit(run_tiles, arrays, window).result()


def check_tiles(run: Tiles, case: Case) -> None:
    step = draw(case)
    wanted = attend(step, case.window)
    exact = gradients(step, wanted)
    arrays = [t.detach().numpy() for t in (step.q, step.cache, *step.place, step.grad)]
    out, lse, *grads = map(torch.from_numpy, run(arrays, case.window))
    assert out.isfinite().all() and lse.isfinite().all()
    real = step.real
    torch.testing.assert_close(out[real], wanted[real], rtol=0, atol=1e-5)
    with torch.no_grad():
        sums = attend_one_by_one(step, case.window)[1]
    torch.testing.assert_close(lse[real], sums[real], rtol=0, atol=1e-5)
    for ours, theirs in zip(grads, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert not ours[~real].any()


@TRITON
@STEPS
def test_tiles_compute_as_the_reference_does(interpreted: Tiles, case: Case) -> None:
    check_tiles(interpreted, case)


@TRITON
@settings(max_examples=8, deadline=None)
@given(make_cases([1, 3, 16, 33, 70]))
def test_tiles_of_any_lanes_compute_as_the_reference_does(interpreted: Tiles, case: Case) -> None:
    check_tiles(interpreted, case)


@TRITON
def test_tiles_do_not_read_what_is_not_there(interpreted: Tiles) -> None:
    case = Case(8, (0, 60, 9), (8, 3, 0))
    step = draw(case)
    attend(step, 0)
    for lane, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        step.cache[:, lane, start + count :] = torch.nan
    tensors = (step.q, step.cache, *step.place, step.grad)
    outputs = interpreted([t.detach().numpy() for t in tensors], 0)
    assert all(np.isfinite(array).all() for array in outputs)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want).norm() / want.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize(
    ("dtype", "tolerances"), [(torch.float32, (1e-5, 1e-5)), (torch.bfloat16, (4e-3, 8e-3))]
)
def test_a_gpu_computes_real_sizes_as_the_reference_does(
    dtype: torch.dtype, tolerances: tuple[float, float], window: int
) -> None:
    torch.manual_seed(0)
    device, num_lanes, width = "cuda", 64, 48
    shapes = [(num_lanes * width, heads, 64) for heads in (8, 4, 4)]
    leaves = [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    cache = torch.randn(2, num_lanes, 3136, 4, 64, device=device, dtype=dtype)
    counts = torch.randint(0, width + 1, (num_lanes,), device=device)
    place = Place(torch.randint(0, 3001, (num_lanes,), device=device), counts)
    real = (torch.arange(width, device=device) < counts[:, None]).flatten()
    grad = torch.randn_like(leaves[0]) * real[:, None, None]
    out = attend_lanes(*leaves, cache, place, window)
    grads = torch.autograd.grad(out, leaves, grad)
    # The cache has the step by now.
    exact, q = cache.double(), leaves[0].detach().double()
    wanted = reference.forward(q, exact, place, window)[0]
    expected = reference.backward(grad.double(), [q], exact, place, window)
    assert relative_error(out[real], wanted[real]) < tolerances[0]
    for ours, theirs in zip(grads, expected, strict=True):
        assert relative_error(ours, theirs) < tolerances[1]
        assert not ours[~real].any()
