"""Lanes: they learn as the published loop does by the book, apart, and on any number of ranks."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from lane_runs import (
    ALONE,
    CONTEXT,
    NUM_TARGETS,
    SETTINGS,
    SHARD,
    SORTED,
    STREAM,
    VOCAB,
    Run,
    make_shard,
)
from lever_stacks import CPU
from thread_ranks import Ranks
from underpar.compile import regions as compiled
from underpar.core.runtime import Clock, Runtime
from underpar.data.batch import segments_from_starts
from underpar.data.shards import Shard
from underpar.infer.lora import AdapterKey, Lora
from underpar.infer.step import forward_step
from underpar.levers import phased_sgd
from underpar.levers.lora_ttt import Settings
from underpar.model.kv_cache import PackedCache
from underpar.score.method import Method
from underpar.score.ttt import lanes
from underpar.score.ttt.lanes import LaneBatch
from underpar.score.ttt.reading import FreshLanes, KeptLanes, StepShapes
from underpar.score.ttt.schedule import Chunk
from underpar.seams import Visit

# Shapes of another number of lanes round otherwise; nats a target, of which it has about four.
TOLERANCE = 1e-4


def price_alike(one: Run, other: Run) -> bool:
    pairs = [(one.nats(document), other.nats(document)) for document in range(len(one.bits))]
    return all(np.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in pairs)


def test_a_document_learns_once_between_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    learn, steps, moved = LaneBatch.learn, dict.fromkeys(range(len(NUM_TARGETS)), 0), list[bool]()

    def watch(batch: LaneBatch, chunks: Sequence[Chunk]) -> None:
        before = batch.lora.weights.clone()
        learn(batch, chunks)
        learning = [chunk.lane for chunk in chunks if not chunk.is_last]
        for chunk in chunks:
            steps[chunk.document] = int(batch.lora.steps[chunk.lane])
        assert all((batch.lora.weights[lane] != before[lane]).any() for lane in learning)
        others = set(range(len(batch.lanes))) - set(learning)
        moved.extend(not torch.equal(batch.lora.weights[i], before[i]) for i in others)

    monkeypatch.setattr(LaneBatch, "learn", watch)
    Run(settings=replace(SETTINGS, short=("8:2",))).go()
    # Chunks of 2 up to 8 targets, then of 4.
    num_chunks = [math.ceil(min(n, 8) / 2) + math.ceil(max(0, n - 8) / 4) for n in NUM_TARGETS]
    assert list(steps.values()) == [max(0, num - 1) for num in num_chunks]
    # Lanes whose document has ended, in steps in which others learn.
    assert moved and not any(moved)


def test_adapted_prices_of_all_tokens_are_one_distribution() -> None:
    run = Run()
    reading = KeptLanes(run.model.spec, SHARD.doc, lambda first: SETTINGS.chunk, 2, CPU)
    lora = Lora(run.model, SETTINGS, range(2), CPU)
    batch = LaneBatch(run.predictor, reading, lora, forward_step, Clock())
    every_token = np.tile(np.arange(VOCAB), (SETTINGS.chunk, 1))
    for first in range(0, 3 * SETTINGS.chunk, SETTINGS.chunk):
        chunks = [Chunk(lane, 3 + 3 * lane, first, SETTINGS.chunk, False) for lane in range(2)]
        batch.begin(chunks)
        priced = batch.price(chunks, dict.fromkeys(range(2), every_token))
        batch.learn(chunks)
        for chunk in chunks:
            log_p = priced[chunk.lane]
            np.testing.assert_allclose(np.exp(log_p[:, 1:]).sum(axis=1), 1, atol=1e-5)
            targets = SHARD.doc(chunk.document)[first + 1 : first + 1 + SETTINGS.chunk]
            assert np.array_equal(log_p[:, 0], log_p[np.arange(len(targets)), 1 + targets])
    assert lora.steps.tolist() == [3, 3]


@pytest.mark.parametrize("num_lanes", [1, 2, 50])
def test_the_number_of_lanes_does_not_matter(num_lanes: int) -> None:
    some = Run(settings=replace(SETTINGS, lanes=num_lanes)).go()
    assert price_alike(some, Run().go())


def test_a_warm_lane_remembers_the_document_before() -> None:
    one, two = (Run(settings=replace(SETTINGS, warm=True, lanes=n)).go() for n in (1, 2))
    assert not price_alike(one, two)


def test_dropping_lanes_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    price, sizes = LaneBatch.price, list[int]()

    def watch(batch: LaneBatch, chunks: Sequence[Chunk], *rest: Any) -> dict[int, np.ndarray]:
        sizes.append(len(batch.lanes))
        return price(batch, chunks, *rest)

    monkeypatch.setattr(LaneBatch, "price", watch)
    settings = replace(SETTINGS, lanes=6, warm=True)
    shrinking = Run(settings=settings).go()
    assert (sizes[0], sizes[-1]) == (6, 1)
    monkeypatch.setattr(LaneBatch, "shrink", lambda batch, chunks: None)
    assert price_alike(shrinking, Run(settings=settings).go())
    assert sizes[-1] == 6


def state_of(batch: LaneBatch) -> dict[str, Any]:
    """Everything that lanes learn, keep and may draw from."""
    lora, reading = batch.lora, batch.reading.state()
    (_, *numpy_state) = np.random.get_state()
    state = {"lora": [lora.weights, lora.moments, lora.steps, lora.work.detach()]}
    state["random"] = [torch.get_rng_state(), *map(torch.as_tensor, numpy_state)]
    if reading:
        held, past = reading["held"], reading["past"]
        state["lengths"] = [past["lengths"], torch.tensor(held)]
        state["last"] = list(past["last"].values())
        caches = past["slots"].values()
        state["keys"] = [cache[:, i, :n] for cache in caches for i, n in enumerate(held)]
    return copy.deepcopy(state)


def capture_before_each_step(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have every batch capture its steps again and again; says each time if nothing changed."""
    price, same = LaneBatch.price, list[bool]()

    def watch(batch: LaneBatch, chunks: Sequence[Chunk], *rest: Any) -> dict[int, np.ndarray]:
        is_fresh = isinstance(batch.reading, FreshLanes)
        widths = (SETTINGS.chunk, CONTEXT) if is_fresh else (SETTINGS.chunk,)
        shapes = StepShapes(widths, SETTINGS.chunk)
        # What lanes remember of the last token exists from the first pass on.
        batch.capture(shapes, 0)
        before = state_of(batch)
        batch.capture(shapes, 0)
        after = state_of(batch)
        pairs = [zip(before[key], after[key], strict=True) for key in before]
        same.append(all(torch.equal(*pair) for group in pairs for pair in group))
        return price(batch, chunks, *rest)

    monkeypatch.setattr(LaneBatch, "price", watch)
    return same


@pytest.mark.parametrize(
    ("method", "keys"), [(STREAM, "kept"), (STREAM, "fresh"), (SORTED, "fresh")]
)
def test_capturing_changes_no_bit(
    method: Method, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, keys=keys)
    cold = Run(settings=settings, method=method).go()
    same = capture_before_each_step(monkeypatch)
    warm = Run(settings=settings, method=method).go()
    assert len(same) > 10 and all(same)
    # Rows are padded to other widths, which rounds otherwise.
    assert price_alike(warm, cold) and warm.score.events == cold.score.events


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that traces as inductor does and computes as torch does."""
    monkeypatch.setattr(compiled, "inductor", aot_eager)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_lanes_price_as_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, capture, num_graphs = Run().go(), LaneBatch.capture, list[int]()

    def watch(batch: LaneBatch, shapes: StepShapes, num_hints: int) -> None:
        capture(batch, shapes, num_hints)
        num_graphs.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(LaneBatch, "capture", watch)
    before = counters["stats"]["unique_graphs"]
    same = capture_before_each_step(monkeypatch)
    other = Run(runtime=replace(ALONE, compiled=True)).go()
    assert price_alike(other, plain) and other.score.events == plain.score.events
    assert len(same) > 10 and all(same)
    # Attention and MLP of two layers, the end, and the update: nothing is compiled later.
    num_graphs.append(counters["stats"]["unique_graphs"])
    assert {num - before for num in num_graphs} == {6}
    assert other.score.seconds["warm-up"] > 0 and "warm-up" not in plain.score.seconds


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "keys"), [(STREAM, "kept"), (STREAM, "fresh"), (SORTED, "fresh")]
)
def test_captured_steps_price_as_eager_ones_on_a_gpu(method: Method, keys: str) -> None:
    plain = Runtime(torch.device("cuda"), precision=torch.float32)
    settings = replace(SETTINGS, keys=keys)
    one, other = (
        Run(settings=settings, method=method, runtime=runtime).go()
        for runtime in (plain, replace(plain, compiled=True))
    )
    assert price_alike(one, other) and one.score.events == other.score.events


@pytest.mark.parametrize(("backend", "recordable"), [("flash", True), ("sdpa", False)])
def test_steps_that_need_the_host_are_not_captured(
    backend: str, recordable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "backend_of", lambda *args: backend)
    run = Run()
    model, text_of = run.model, SHARD.doc
    fresh = FreshLanes(model.spec, text_of, lambda chunk: (0, 1, 0))
    kept = KeptLanes(model.spec, text_of, lambda first: 4, 3, CPU)
    monkeypatch.setattr(run.predictor, "device", torch.device("cuda"))

    def says(reading: FreshLanes | KeptLanes) -> bool:
        lora = Lora(model, SETTINGS, range(3), CPU)
        return LaneBatch(run.predictor, reading, lora, forward_step, Clock()).is_capturable()

    # Kept lanes have an attention of their own.
    assert (says(fresh), says(kept)) == (recordable, True)
    monkeypatch.setattr(run.predictor, "device", CPU)
    assert not says(fresh) and not says(kept)


class ByTheBook:
    """The published loop for one document at a time: adapters are leaves, AdamW is written out."""

    def __init__(self, run: Run) -> None:
        self.settings, self.model = run.settings, run.predictor.model
        self.a: dict[AdapterKey, Tensor] = {}
        self.b: dict[AdapterKey, Tensor] = {}

    def prices(self) -> dict[int, np.ndarray]:
        """Document -> nats; groups of documents of like length, the longest first."""
        ascending = sorted(range(len(NUM_TARGETS)), key=NUM_TARGETS.__getitem__)
        size = self.settings.lanes
        groups = [ascending[i : i + size] for i in range(0, len(ascending), size)]
        nats: dict[int, np.ndarray] = {}
        slots: list[dict[AdapterKey, Tensor]] = []
        for group in reversed(groups):
            longest = NUM_TARGETS[group[-1]]
            # The number of tokens, both BOS counted, decides.
            chunk = 2 if longest + 1 <= 6 else self.settings.chunk
            if len(slots) != len(group):
                slots = [self._first_a(slot) for slot in range(len(group))]
            for slot, document in enumerate(group):
                if not self.settings.warm:
                    slots[slot] = self._first_a(document)
                self.a = slots[slot]
                nats[document], num_steps = self._read(document, chunk)
                if self.settings.decay_all:
                    num_left = math.ceil(longest / chunk) - 1 - num_steps
                    for a in self.a.values():
                        a.data *= (1 - self.settings.lr * self.settings.decay) ** num_left
        return nats

    def _first_a(self, number: int) -> dict[AdapterKey, Tensor]:
        lora = Lora(self.model, self.settings, [number], CPU)
        pairs = lora.layout.cut(lora.weights)
        self.b = {place: b[0] for place, (_, b) in pairs.items()}
        return {place: a[0].clone().requires_grad_() for place, (a, _) in pairs.items()}

    def _read(self, document: int, chunk: int) -> tuple[np.ndarray, int]:
        text = np.append(SHARD.doc(document), 1).astype(np.int64)
        self.b = {place: torch.zeros_like(b, requires_grad=True) for place, b in self.b.items()}
        leaves = [*self.a.values(), *self.b.values()]
        moments = [torch.zeros_like(leaf) for leaf in leaves]
        nats, num_steps, num_targets = [np.zeros(0)], 0, NUM_TARGETS[document]
        for first in range(0, num_targets, chunk):
            end = min(first + chunk, num_targets)
            start = max(0, end - CONTEXT)
            losses = self._losses(text[start : end + 1])[first - start :]
            nats.append(losses.detach().numpy())
            if end < num_targets:
                num_steps += 1
                self._step(leaves, torch.autograd.grad(losses.mean(), leaves), moments, num_steps)
        return np.concatenate(nats), num_steps

    def _losses(self, text: np.ndarray) -> Tensor:
        cache = PackedCache(segments_from_starts(np.array([0]), len(text) - 1, CONTEXT))
        self.model.hooks.adjust.append(self._adjust)
        logits = self.model(torch.from_numpy(text[:-1]), cache)
        self.model.hooks.adjust.clear()
        return F.cross_entropy(logits, torch.from_numpy(text[1:]), reduction="none")

    def _adjust(self, site: str, visit: Visit | None, y: Tensor, x: Tensor) -> Tensor:
        place = (site, None if visit is None else visit.slot)
        return (
            y + self.settings.alpha / self.settings.rank * (x @ self.a[place].T) @ self.b[place].T
        )

    @torch.no_grad()
    def _step(
        self, leaves: list[Tensor], grads: Sequence[Tensor], moments: list[Tensor], k: int
    ) -> None:
        settings = self.settings
        for p, g, v in zip(leaves, grads, moments, strict=True):
            v.copy_(settings.beta2 * v + (1 - settings.beta2) * g**2)
            p *= 1 - settings.lr * settings.decay
            p -= settings.lr * g / ((v / (1 - settings.beta2**k)).sqrt() + settings.eps)


@pytest.mark.parametrize("warm", [False, True])
def test_the_published_order_is_that_of_the_book(warm: bool) -> None:
    settings = replace(SETTINGS, warm=warm, decay_all=warm, short=("6:2",), decay=10.0)
    run = Run(settings=settings, method=SORTED).go()
    assert [document for document, first, _ in run.commits if first == 0] == [3, 6, 5, 4, 1, 0, 2]
    wanted = ByTheBook(run).prices()
    for document, nats in wanted.items():
        np.testing.assert_allclose(run.nats(document), nats, rtol=0, atol=1e-3, strict=True)


DECAY_ALL = {"warm": True, "decay_all": True, "decay": 10.0}


@pytest.mark.parametrize(
    ("shard", "method", "changes"),
    [
        # A rank whose documents run out, one without a lane, and one whose lane has no target.
        (SHARD, STREAM, {"lanes": 3, "warm": True}),
        (SHARD, STREAM, {"lanes": 1}),
        (make_shard([9, 1]), STREAM, {"lanes": 2, "keys": "fresh", **DECAY_ALL}),
        # Lanes of one rank that are done, and decay while those of the other learn.
        (SHARD, SORTED, {"lanes": 2, **DECAY_ALL}),
    ],
)
def test_two_ranks_price_as_one(shard: Shard, method: Method, changes: dict[str, Any]) -> None:
    ranks = Ranks()

    def make(runtime: Runtime) -> Run:
        phases = phased_sgd.PhasedSGD(phased_sgd.Settings(prefix=0.5, lr=0.1, chunk_tokens=16))
        settings: Settings = replace(SETTINGS, **changes)
        return Run(shard, settings, method, phases=phases, runtime=runtime)

    alone, runs = make(ALONE).go(), [make(runtime) for runtime in ranks.runtimes]
    pair = ranks.go([run.go for run in runs])
    for run in pair:
        assert price_alike(run, alone)
        assert run.score.events == alone.score.events
    assert pair[0].predictor.state_hash() == pair[1].predictor.state_hash()
