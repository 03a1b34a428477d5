"""Chunks of lanes: read as packs are, in whatever chunks, and learned from within the chunk."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lever_stacks import CPU, MODEL, groups_of, randomized, stack_with
from underpar.data.batch import pack_documents
from underpar.kernels.attention import attend
from underpar.model.chunk_cache import ChunkCache
from underpar.model.kv_cache import SPAN, PackedCache
from underpar.model.network import Network
from underpar.recipe import ModelSpec, load_recipe

# Largest difference between two ways to compute the same hidden states, fp32.
TOLERANCE = 1e-5
SPEC = ModelSpec(num_layers=1, dim=32, num_heads=4, num_kv_heads=2, context=150)
NETWORKS = ("pr2014", "pr2135", "pr1894", "pr1493", "pr1219", "hnet-m1-fixed", "hnet-16mb")


def make_documents(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.append(1, rng.integers(4, 260, n - 1)) for n in lengths]


def read_packed(model: Network, documents: list[np.ndarray]) -> list[torch.Tensor]:
    batch, owner = pack_documents(documents, 1, model.spec.context)
    hidden = model.hidden(batch.inputs, PackedCache(batch.segments))
    sizes = np.bincount(owner).tolist()
    return list(hidden.split(sizes))


class Lanes:
    """Documents side by side, and what was read of each."""

    def __init__(self, model: Network, documents: list[np.ndarray]) -> None:
        self.model = model
        self.documents = documents
        self.cache = ChunkCache(model.spec, len(documents), CPU)
        self.read = [0] * len(documents)
        self.hidden: list[list[torch.Tensor]] = [[] for _ in documents]

    def step(self, counts: list[int], width: int, padding: int = 0) -> torch.Tensor:
        inputs = torch.full((len(counts), width), padding)
        for lane, count in enumerate(counts):
            first = self.read[lane]
            inputs[lane, :count] = torch.from_numpy(self.documents[lane][first : first + count])
            self.read[lane] += count
        farthest = max(r for r, count in zip(self.read, counts, strict=True) if count)
        self.cache.begin(torch.tensor(counts), width, farthest)
        hidden = self.model.hidden(inputs.flatten(), self.cache).unflatten(0, (-1, width))
        for lane, count in enumerate(counts):
            self.hidden[lane].append(hidden[lane, :count])
        return hidden

    def read_all(self, draw: Callable[[], int]) -> list[torch.Tensor]:
        """Each lane takes `draw()` tokens, or what is left; the widest count is the width."""
        while left := [len(d) - r for d, r in zip(self.documents, self.read, strict=True)]:
            counts = [min(draw(), n) for n in left]
            if not any(left):
                break
            if any(counts):
                self.step(counts, max(counts) + draw() % 3)
                self.cache.commit()
        return [torch.cat(parts) for parts in self.hidden]


def check_parity(
    model: Network, lengths: list[int], largest: int, seed: int, tolerance: float = TOLERANCE
) -> None:
    documents = make_documents(lengths, seed)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        chunked = Lanes(model, documents).read_all(lambda: int(rng.integers(largest + 1)))
        wanted = read_packed(model, documents)
    torch.testing.assert_close(chunked, wanted, rtol=0, atol=tolerance)


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Network:
    # A window that these short documents outgrow.
    small = ["levers.window.size=32"] if request.param == "pr1219" else []
    return randomized(load_recipe(f"{request.param}+cpu", small))


@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 128), min_size=1, max_size=4),
    largest=st.integers(6, 60),
    seed=st.integers(0, 99),
)
def test_any_split_reads_as_a_pack(
    network: Network, lengths: list[int], largest: int, seed: int
) -> None:
    check_parity(network, lengths, largest, seed)


@pytest.mark.parametrize("names", groups_of(MODEL), ids=lambda names: f"{len(names)}-{names[0]}")
def test_every_model_lever_reads_as_in_a_pack(names: tuple[str, ...]) -> None:
    # In fp64, because levers with random weights carry roundings further than a trained stack.
    check_parity(randomized(stack_with(*names)).double(), [100, 1, 70], 40, 0, tolerance=1e-9)


@pytest.fixture(scope="module", params=["pr2014", "hnet-m2"])
def model(request: pytest.FixtureRequest) -> Network:
    return randomized(load_recipe(f"{request.param}+cpu"))


def test_a_lane_takes_up_another_document(model: Network) -> None:
    first, second, beside = make_documents([40, 60, 90])
    with torch.no_grad():
        lanes = Lanes(model, [first, beside])
        lanes.step([40, 40], 40)
        lanes.cache.commit()
        lanes.cache.reset(torch.tensor([True, False]))
        lanes.documents[0], lanes.read[0] = second, 0
        lanes.read_all(lambda: 25)
        wanted = read_packed(model, [first, second, beside])
    chunked = [torch.cat(parts) for parts in lanes.hidden]
    torch.testing.assert_close(chunked[0], torch.cat(wanted[:2]), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(chunked[1], wanted[2], rtol=0, atol=TOLERANCE)


def test_some_lanes_go_on_in_another_order(model: Network) -> None:
    documents = make_documents([90, 80, 100])
    with torch.no_grad():
        lanes = Lanes(model, documents)
        lanes.step([30, 20, 40], 40)
        lanes.cache.commit()
        kept = [2, 0]
        lanes.cache.keep(torch.tensor(kept))
        for name in ("documents", "read", "hidden"):
            setattr(lanes, name, [getattr(lanes, name)[lane] for lane in kept])
        chunked = lanes.read_all(lambda: 33)
        wanted = read_packed(model, [documents[lane] for lane in kept])
    torch.testing.assert_close(chunked, wanted, rtol=0, atol=TOLERANCE)


def test_a_full_lane_reads_its_end_again(model: Network) -> None:
    context = model.spec.context
    long, short = make_documents([context + 20, 100])
    half = long[context // 2 :]
    with torch.no_grad():
        lanes = Lanes(model, [long, short])
        lanes.step([context, 60], context)
        lanes.cache.commit()
        again = lanes.cache.empty_like(1)
        again.begin(torch.tensor([context // 2]), context // 2, context // 2)
        model.hidden(torch.from_numpy(half[: context // 2]), again)
        again.commit()
        lanes.cache.put([0], again)
        assert lanes.cache.lengths.tolist() == [context // 2, 60]
        lanes.read[0] = context // 2
        lanes.documents[0] = half
        lanes.hidden[0].clear()
        chunked = lanes.read_all(lambda: 20)
        # A window has no token before its first.
        [window] = Lanes(model, [half]).read_all(lambda: len(half))
        [beside] = read_packed(model, [short])
    torch.testing.assert_close(chunked[0], window[context // 2 :], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(chunked[1], beside, rtol=0, atol=TOLERANCE)


def test_lanes_that_rest_stay_as_they_are(model: Network) -> None:
    context = model.spec.context
    documents = make_documents([context, context])
    with torch.no_grad():
        lanes = Lanes(model, documents)
        # The first lane is full; its padding has no room and must not reach the second's keys.
        for counts in ([context, 4], [0, 60], [0, 2], [0, 62]):
            lanes.step(counts, max(max(counts), 60))
            lanes.cache.commit()
        wanted = read_packed(model, documents)
    assert lanes.cache.lengths.tolist() == [context, context]
    chunked = [torch.cat(parts) for parts in lanes.hidden]
    torch.testing.assert_close(chunked, wanted, rtol=0, atol=TOLERANCE)


def test_padding_and_other_lanes_change_nothing(model: Network) -> None:
    one, two, other = make_documents([80, 80, 80])

    def run(beside: np.ndarray, padding: int) -> torch.Tensor:
        lanes = Lanes(model, [one, beside])
        lanes.step([30, 10], 48, padding)
        lanes.cache.commit()
        lanes.step([20, 48], 48, padding)
        return torch.cat(lanes.hidden[0])

    with torch.no_grad():
        plain = run(two, 0)
        assert torch.equal(run(two, 77), plain)
        assert torch.equal(run(other, 0), plain)


def test_a_step_that_is_not_committed_leaves_no_trace(model: Network) -> None:
    documents = make_documents([60, 50])
    with torch.no_grad():
        lanes = Lanes(model, documents)
        lanes.step([20, 20], 20)
        lanes.cache.commit()
        first = lanes.step([10, 15], 15, padding=9).clone()
        lanes.read = [20, 20]
        again = lanes.step([10, 15], 15, padding=9)
    assert torch.equal(first, again)


def test_the_token_before_is_that_of_the_lane() -> None:
    cache = ChunkCache(SPEC, 2, CPU)
    cache.begin(torch.tensor([3, 1]), 3, 3)
    assert cache.positions.tolist() == [0, 1, 2, 0, 1, 2]
    x = torch.tensor([1, 2, 3, 4, 9, 9])
    assert cache.previous("mine", x).tolist() == [0, 1, 2, 0, 4, 9]
    cache.commit()
    cache.begin(torch.tensor([1, 0]), 2, 4)
    assert cache.positions.tolist() == [3, 4, 1, 2]
    assert cache.previous("mine", torch.tensor([5, 9, 9, 9])).tolist() == [3, 5, 4, 9]
    cache.commit()
    cache.reset(torch.tensor([False, True]))
    cache.begin(torch.tensor([1, 1]), 1, 5)
    assert cache.previous("mine", torch.tensor([6, 7])).tolist() == [5, 0]


@pytest.mark.parametrize("window", [0, 7])
def test_gradients_stay_within_the_chunk(window: int) -> None:
    torch.manual_seed(0)
    tensors = [[torch.randn(n, heads, 8) for heads in (4, 2, 2)] for n in (70, 25)]
    cache = ChunkCache(SPEC, 2, CPU)
    before, now = [45, 20], [25, 5]

    def padded(part: int, first: list[int], count: list[int]) -> torch.Tensor:
        rows = [
            torch.nn.functional.pad(lane[part][f : f + c], (0, 0, 0, 0, 0, 45 - c))
            for lane, f, c in zip(tensors, first, count, strict=True)
        ]
        return torch.cat(rows)

    cache.begin(torch.tensor(before), 45, 45)
    cache.attend(3, *(padded(part, [0, 0], before) for part in range(3)), window)
    cache.commit()
    cache.begin(torch.tensor(now), 45, 70)
    parts = [padded(part, before, now).requires_grad_() for part in range(3)]
    y = cache.attend(3, *parts, window).unflatten(0, (2, 45))
    weights = [torch.randn(n, 4, 8) for n in now]
    sum((y[lane, :n] * weights[lane]).sum() for lane, n in enumerate(now)).backward()
    for lane, (tokens, first, count) in enumerate(zip(tensors, before, now, strict=True)):
        whole = [t.clone().requires_grad_() for t in tokens]
        cu = torch.tensor([0, len(tokens[0])], dtype=torch.int32)
        wanted = attend(*whole, cu, len(tokens[0]), window, backend="reference")[first:]
        torch.testing.assert_close(y[lane, :count], wanted, rtol=0, atol=1e-5)
        (wanted * weights[lane]).sum().backward()
        for leaf, exact in zip(parts, whole, strict=True):
            grad = leaf.grad.unflatten(0, (2, 45))[lane]
            torch.testing.assert_close(grad[:count], exact.grad[first:], rtol=0, atol=1e-5)
            assert not grad[count:].any()


def test_a_chunk_of_the_whole_document_learns_as_a_pack(model: Network) -> None:
    documents = make_documents([50, 70])
    grads = []
    for read in (
        lambda: read_packed(model, documents),
        lambda: Lanes(model, documents).read_all(lambda: 90),
    ):
        model.zero_grad()
        sum(h.square().mean(0).sin().sum() for h in read()).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    assert len(grads[0]) > 50
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)


def test_halves_are_kept_in_half_precision() -> None:
    model = randomized(load_recipe("pr2014+cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        lanes = Lanes(model, make_documents([60, 40]))
        chunked = lanes.read_all(lambda: 30)
        wanted = read_packed(model, lanes.documents)
    assert {cache.dtype for cache in lanes.cache._slots.values()} == {torch.bfloat16}
    torch.testing.assert_close(chunked, wanted, rtol=0, atol=0.2)
    assert chunked[0].dtype == torch.bfloat16


def test_memory_follows_the_text_until_it_is_reserved() -> None:
    cache = ChunkCache(replace(SPEC, context=1 << 20), 2, CPU)
    q, kv = torch.randn(10, 4, 8), torch.randn(10, 2, 8)
    cache.begin(torch.tensor([5, 5]), 5, 5)
    cache.attend(0, q, kv, kv, 0)
    cache.commit()
    assert cache._slots[0].shape == (2, 2, SPAN, 2, 8)
    cache.reserve(1000)
    address = cache._slots[0].data_ptr()
    cache.begin(torch.tensor([5, 5]), 5, 10)
    cache.attend(0, q, kv, kv, 0)
    cache.commit()
    assert cache._slots[0].data_ptr() == address and cache.room > 1000
    assert torch.equal(cache._slots[0][0, 0, 5:10], cache._slots[0][0, 0, :5])
