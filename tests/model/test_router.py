"""Boundaries, their gradients, and the blend of chunks against its plain recurrence."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from underpar.data.batch import segments_from_starts
from underpar.model.chunks import DOUBLINGS, LaneChunks, PackedChunks, cut
from underpar.model.kv_cache import LaneCache, PackedCache
from underpar.model.router import Router, boundaries_of, ratio_loss, straight_through
from underpar.recipe import ModelSpec

SPEC = ModelSpec(
    vocab_size=260, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, mlp_dim=8, context=64
)


def pack(lengths: list[int]) -> PackedCache:
    starts = np.cumsum([0, *lengths[:-1]])
    return PackedCache(segments_from_starts(starts, sum(lengths), 1024))


def recurrence(y: Tensor, p: Tensor, is_start: Tensor) -> Tensor:
    """z[c] = p[c] y[c] + (1 - p[c]) z[c - 1], one chunk after the other; y at a start."""
    rows: list[Tensor] = []
    for c in range(len(y)):
        rows.append(y[c] if is_start[c] else p[c] * y[c] + (1 - p[c]) * rows[-1])
    return torch.stack(rows)


def test_the_router_starts_as_the_cosine_of_neighbours() -> None:
    torch.manual_seed(0)
    h = torch.randn(12, 16)
    h[3], h[5] = 2.0 * h[2], -h[4]
    cache = pack([7, 5])
    p = Router(16)(h, cache)
    expected = (1 - F.cosine_similarity(h[:-1], h[1:])) / 2
    expected = torch.cat((torch.ones(1), expected))
    expected[7] = 1.0
    torch.testing.assert_close(p, expected)
    # Alike: no boundary; opposite: a boundary; a document begins: a boundary.
    torch.testing.assert_close(p[[0, 3, 5, 7]], torch.tensor([1.0, 0.0, 1.0, 1.0]))


def test_the_router_reads_no_document_but_its_own() -> None:
    torch.manual_seed(0)
    router, h = Router(16), torch.randn(12, 16)
    other = torch.cat((torch.randn(7, 16), h[7:]))
    assert torch.equal(router(h, pack([7, 5]))[7:], router(other, pack([7, 5]))[7:])


def test_an_even_chance_begins_no_chunk() -> None:
    p = torch.tensor([0.0, 0.5, 0.5 + 1e-6, 1.0])
    assert boundaries_of(p).tolist() == [False, False, True, True]


def test_the_factor_is_one_and_its_gradient_that_of_the_confidence() -> None:
    p = torch.tensor([0.1, 0.37, 0.5, 0.7, 1.0], requires_grad=True)
    factor = straight_through(p)
    assert torch.equal(factor, torch.ones(5))
    upstream = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    factor.backward(upstream)
    # Down where there is no boundary, up where there is one.
    assert p.grad is not None and p.grad.tolist() == [-1.0, -2.0, -3.0, 4.0, 5.0]


@pytest.mark.parametrize("n", [2, 4, 6])
def test_the_ratio_loss_is_one_at_its_target(n: int) -> None:
    # One boundary in n bytes, and a mean of 1 / n: the rest is far below an even chance.
    p = torch.zeros(n * 10, dtype=torch.float64)
    p[::n] = 1.0
    assert float(ratio_loss(p, n)) == pytest.approx(1.0)


@pytest.mark.parametrize(("period", "sign"), [(2, 1.0), (4, 0.0), (8, -1.0)])
def test_the_ratio_loss_pushes_towards_its_target(period: int, sign: float) -> None:
    p = torch.full((80,), 0.2, dtype=torch.float64)
    p[::period] = 0.9
    p.requires_grad_()
    ratio_loss(p, 4).backward()
    assert p.grad is not None
    # N / (N - 1) (N F - 1) for the mean, an 80th of it for each byte.
    expected = 4 / 3 * (4 / period - 1) / 80
    torch.testing.assert_close(p.grad, torch.full_like(p.grad, expected))
    assert np.sign(expected) == sign


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    in_place=st.booleans(),
)
def test_doubling_equals_the_recurrence(lengths: list[int], seed: int, in_place: bool) -> None:
    cache, source = pack(lengths), torch.Generator().manual_seed(seed)
    num = sum(lengths)
    every = torch.ones(num, dtype=torch.bool)
    chunks = PackedChunks(cache, every, num if in_place else 0)
    y = torch.randn(num, 3, generator=source, dtype=torch.float64).requires_grad_()
    p = 0.5 + torch.rand(num, generator=source, dtype=torch.float64) / 2
    p[::5] = 1.0
    p[1::5] = 0.5
    p.requires_grad_()
    upstream = torch.randn(num, 3, generator=source, dtype=torch.float64)
    plain = recurrence(y, p, cache.positions == 0)
    fast = chunks.smooth(y, p)
    # What is older than 32 chunks is left out, and it has a share of 2^-32 at most.
    bound = 4 * 2.0 ** -(2**DOUBLINGS) * float(y.detach().abs().max())
    torch.testing.assert_close(fast, plain, rtol=0, atol=bound + 1e-12)
    gradients = [
        torch.autograd.grad((z * upstream).sum(), (y, p), materialize_grads=True)
        for z in (fast, plain)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=100 * bound + 1e-12)
    # The first chunk of a segment is what it is, so its probability has no say.
    assert not gradients[0][1][cache.positions == 0].any()


def test_chunks_of_one_byte_and_certain_are_the_bytes() -> None:
    cache = pack([9, 1, 4])
    chunks = PackedChunks(cache, torch.ones(14, dtype=torch.bool))
    h = torch.randn(14, 5)
    assert torch.equal(chunks.spread(chunks.smooth(chunks.gather(h), torch.ones(14))), h)


def test_lanes_blend_as_packs_do() -> None:
    torch.manual_seed(0)
    lengths, y, p = [9, 6], torch.randn(15, 4), torch.rand(15)
    cache = pack(lengths)
    p[cache.positions == 0] = 1.0
    is_boundary = boundaries_of(p)
    packed = PackedChunks(cache, is_boundary)
    whole = packed.spread(packed.smooth(packed.gather(y), packed.gather(p)))
    lanes, stepped = LaneCache(SPEC, 1, torch.device("cpu")), []
    for place in range(15):
        lanes.reset(cache.positions[place][None] == 0)
        lanes.place()
        chunks = cut(lanes, is_boundary[place][None])
        assert isinstance(chunks, LaneChunks)
        blended = chunks.smooth(chunks.gather(y[place][None]), p[place][None])
        stepped.append(chunks.spread(blended))
        lanes.advance()
    torch.testing.assert_close(torch.cat(stepped), whole)
