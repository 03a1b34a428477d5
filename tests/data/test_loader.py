"""The training loader: the plan, ranks, resuming, padding and prefetching."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch import slow_segments
from test_order import LENGTHS, make_shard

from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch, Segments
from underpar.data.folder import load_data
from underpar.data.loader import (
    CU_BUCKET,
    Loader,
    MicroBatch,
    Place,
    make_step,
    micros_of_rank,
    prefetch,
)
from underpar.data.shards import Shard
from underpar.errors import DataError, RecipeError
from underpar.recipe import load_recipe
from underpar.stages.train import make_trainer, train

ORDERS = ["documents", "sequences"]
# No two micro-batches of one size, and contexts above and below it.
MIXED = [MicroBatch(30, 8), MicroBatch(41, 8), MicroBatch(25, 40), MicroBatch(7, 3)]


@pytest.fixture(scope="module")
def shard() -> Shard:
    return make_shard(LENGTHS)


def same(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a.inputs, b.inputs)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.segments.cu, b.segments.cu)
        and torch.equal(a.segments.positions, b.segments.positions)
        and a.segments.max_len == b.segments.max_len
    )


def make_loader(shard: Shard, num_tokens: int, num_micros: int, context: int, seed: int) -> Loader:
    return Loader(shard, make_step(num_micros, [num_tokens], [context]), seed)


def stream_of(loader: Loader, num_tokens: int) -> torch.Tensor:
    num_steps = -(-num_tokens // loader.step_tokens)
    places = itertools.product(range(num_steps), range(loader.num_micro_batches))
    return torch.cat([loader.batch(*place).inputs for place in places])[:num_tokens]


@pytest.mark.parametrize("micro_batch_tokens", [7, 64, 500])
def test_targets_are_the_next_tokens_of_the_stream(shard: Shard, micro_batch_tokens: int) -> None:
    loader = make_loader(shard, micro_batch_tokens, 3, context=16, seed=0)
    stream = stream_of(loader, 12 * micro_batch_tokens)
    for i in range(9):
        batch = loader.batch(*divmod(i, 3))
        begin = i * micro_batch_tokens
        assert torch.equal(batch.inputs, stream[begin : begin + micro_batch_tokens])
        assert torch.equal(batch.targets, stream[begin + 1 : begin + micro_batch_tokens + 1])
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64


def test_the_stream_does_not_depend_on_how_it_is_cut(shard: Shard) -> None:
    plans = [make_step(1, [10], [8]), make_step(4, [33], [512]), make_step(2, [400], [1, 3]), MIXED]
    streams = [stream_of(Loader(shard, plan, seed=5), 400) for plan in plans]
    assert all(torch.equal(streams[0], stream) for stream in streams)


def test_contexts_are_taken_in_turn() -> None:
    plan = make_step(5, [30], [8, 16, 8])
    assert [micro.context for micro in plan] == [8, 16, 8, 8, 16]
    assert {micro.tokens for micro in plan} == {30}


@pytest.mark.parametrize("order", ORDERS)
def test_a_mixed_plan_lies_end_to_end_in_the_stream(shard: Shard, order: str) -> None:
    loader = Loader(shard, MIXED, 6, order)
    assert loader.step_tokens == 103
    # Sequences are cut by the largest context, whichever micro-batch they fall to.
    stream = stream_of(Loader(shard, [MicroBatch(1030, 40)], 6, order), 1030)
    begin = 0
    for step, micro in itertools.product(range(10), range(4)):
        batch = loader.batch(step, micro)
        assert torch.equal(batch.inputs, stream[begin : begin + MIXED[micro].tokens])
        assert batch.segments.context == MIXED[micro].context
        begin += MIXED[micro].tokens


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("plan", [make_step(8, [30], [16]), MIXED], ids=["equal", "mixed"])
def test_any_number_of_ranks_sees_the_same_global_batch(
    shard: Shard, plan: list[MicroBatch], order: str
) -> None:
    alone = Loader(shard, plan, 1, order)
    for world_size in (1, 2, 4):
        seen: dict[int, Batch] = {}
        for rank in range(world_size):
            loader = Loader(shard, plan, 1, order)
            for micro in micros_of_rank(len(plan), rank, world_size):
                assert micro not in seen
                seen[micro] = loader.batch(5, micro)
        assert sorted(seen) == list(range(len(plan)))
        assert all(same(seen[micro], alone.batch(5, micro)) for micro in seen)
    whole = Loader(shard, [MicroBatch(alone.step_tokens, max(p.context for p in plan))], 1, order)
    spans = torch.cat([alone.batch(5, micro).inputs for micro in range(len(plan))])
    assert torch.equal(spans, whole.batch(5, 0).inputs)


def test_ranks_that_do_not_divide_the_step_are_refused() -> None:
    with pytest.raises(RecipeError, match="8 micro-batches per step cannot be shared by 3 ranks"):
        micros_of_rank(8, 0, 3)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ORDERS), st.integers(0, 40), st.lists(st.integers(0, 40), max_size=4))
def test_a_resumed_loader_continues_as_the_first_would(
    shard: Shard, order: str, step: int, before: list[int]
) -> None:
    first, resumed = Loader(shard, MIXED, 9, order), Loader(shard, MIXED, 9, order)
    for earlier in before:
        first.batch(earlier, 0)
    for micro in range(len(MIXED)):
        assert same(first.batch(step, micro), resumed.batch(step, micro))


@pytest.mark.parametrize("order", ORDERS)
def test_the_seed_decides_the_order(shard: Shard, order: str) -> None:
    plan = make_step(1, [100], [16])
    batches = [Loader(shard, plan, seed, order).batch(0, 0) for seed in range(5)]
    assert len({tuple(batch.inputs.tolist()) for batch in batches}) == 5


def test_num_epochs_counts_passes(shard: Shard) -> None:
    loader = make_loader(shard, shard.num_tokens, 4, context=16, seed=0)
    assert [loader.num_epochs(step) for step in (0, 1, 3)] == [0.0, 4.0, 12.0]
    # Ten windows of 16 lie in 177 tokens at every phase.
    sequences = Loader(shard, make_step(2, [80], [16]), 0, "sequences")
    assert [sequences.num_epochs(step) for step in (0, 1, 3)] == [0.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_tokens": 0}, "tokens of a micro-batch is 0, expected at least 1"),
        ({"num_micros": 0}, "a step has 0 micro-batches, expected at least 1"),
        ({"context": -1}, "context of a micro-batch is -1, expected at least 1"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
    ],
)
def test_bad_settings_are_refused(shard: Shard, changed: dict[str, int], message: str) -> None:
    values = {"num_tokens": 8, "num_micros": 1, "context": 8, "seed": 0}
    with pytest.raises(RecipeError, match=message) as caught:
        make_loader(shard, **(values | changed))
    assert "\n" not in str(caught.value)


def test_an_unknown_order_is_refused(shard: Shard) -> None:
    with pytest.raises(RecipeError, match="'shards', expected 'documents' or 'sequences'"):
        Loader(shard, MIXED, 0, "shards")


def test_an_empty_shard_is_refused() -> None:
    with pytest.raises(DataError, match="shard is empty"):
        Loader(make_shard([]), MIXED, 0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.order=shards", ("train.order", "'shards'", "'documents'", "'sequences'")),
        ("train.contexts=[64, 0]", ("train.contexts", "0", "positive")),
        ("train.contexts=64", ("train.contexts", "64", "list")),
    ],
)
def test_a_recipe_names_what_the_loader_knows(override: str, words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("demo", [override])
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_a_recipe_becomes_a_plan(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    def plan_of(*overrides: str) -> tuple[MicroBatch, ...]:
        recipe = load_recipe("cpu", ["train.num_micro_batches=3", "model.num_layers=1", *overrides])
        data = load_data(tiny_data)
        return make_trainer(recipe, data, RunFolder(tmp_path), runtime).loader.plan

    assert plan_of("train.context=48") == (MicroBatch(1024, 48),) * 3
    mixed = plan_of("train.contexts=[32, 64]", "train.order=sequences")
    assert [micro.context for micro in mixed] == [32, 64, 32]


@pytest.mark.parametrize("order", ORDERS)
def test_mixed_contexts_train(
    tiny_data: Path, tmp_path: Path, runtime: Runtime, order: str
) -> None:
    sets = ["train.budget_steps=8", "train.contexts=[32, 64]", f"train.order={order}"]
    sets += ["model.num_layers=2"]
    folder = RunFolder(tmp_path)
    assert train(load_recipe("baseline+cpu", sets), tiny_data, folder, runtime)["finished"]
    losses = [m["loss"] for m in folder.metrics()]
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("context", [None, 1, 5, 16, 1000])
def test_a_batch_is_cut_at_its_documents_or_windows(
    shard: Shard, order: str, context: int | None
) -> None:
    loader = Loader(shard, make_step(2, [100], [16]), 2, order)
    for step, micro in itertools.product(range(6), range(2)):
        batch, planned = loader.batch(step, micro, context), loader.batch(step, micro)
        assert torch.equal(batch.inputs, planned.inputs)
        assert torch.equal(batch.targets, planned.targets)
        starts = set(torch.nonzero(batch.inputs == 1).flatten().tolist())
        if order == "sequences":
            # An epoch holds ten windows, so they stay in step; documents do not cut.
            starts = {i for i in range(100) if (step * 200 + micro * 100 + i) % 16 == 0}
        cu, positions = slow_segments(starts, 100, context or 16)
        assert batch.segments.cu.tolist() == cu + [100] * (-len(cu) % CU_BUCKET)
        assert batch.segments.positions.tolist() == positions
        # The plan's largest context bounds all segments, whatever the cut.
        assert batch.segments.max_len == min(max(context or 16, 16), 100)


def test_padding_can_be_switched_off(shard: Shard) -> None:
    plan = make_step(1, [100], [16])
    for cu_bucket in (0, 1):
        cu = Loader(shard, plan, 2, cu_bucket=cu_bucket).batch(0, 0).segments.cu
        assert (cu.diff() > 0).all()
    assert len(Loader(shard, plan, 2, cu_bucket=50).batch(0, 0).segments.cu) == 50


def test_a_batch_moves_to_a_device_whole(shard: Shard) -> None:
    batch = make_loader(shard, 20, 1, context=8, seed=2).batch(0, 0).to("meta", non_blocking=True)
    assert isinstance(batch.segments, Segments)
    tensors = (batch.inputs, batch.targets, batch.segments.cu, batch.segments.positions)
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert batch.segments.max_len == 8


def test_prefetch_gives_the_batches_in_order(shard: Shard) -> None:
    loader = make_loader(shard, 30, 2, context=16, seed=4)
    places: list[Place] = [(step, micro) for step in range(9) for micro in range(2)]
    places += [(3, 1, 5), (3, 1, None), (3, 1, 9)]
    fetched = list(prefetch(loader, iter(places)))
    assert len(fetched) == 21
    assert [batch.segments.context for batch in fetched[-3:]] == [5, 16, 9]
    assert all(
        same(batch, loader.batch(*place)) for batch, place in zip(fetched, places, strict=True)
    )
    assert list(prefetch(loader, [])) == []


def test_prefetch_pins_whole_batches(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    # Real pinning needs a GPU.
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    loader = make_loader(shard, 30, 1, context=16, seed=4)
    (batch,) = prefetch(loader, [(2, 0)], pin=True)
    tensors = (batch.inputs, batch.targets, batch.segments.cu, batch.segments.positions)
    assert {id(tensor) for tensor in tensors} == {id(tensor) for tensor in pinned}
    assert same(batch, loader.batch(2, 0))


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("underpar-loader")]


def test_prefetch_runs_two_ahead_and_stops_when_closed(shard: Shard) -> None:
    asked: list[int] = []

    def endless() -> Iterator[tuple[int, int]]:
        for step in itertools.count():
            asked.append(step)
            yield step, 0

    batches = prefetch(make_loader(shard, 30, 1, context=16, seed=4), endless())
    next(batches)
    assert asked == [0, 1, 2] and loader_threads()
    batches.close()  # type: ignore[attr-defined]
    assert asked == [0, 1, 2] and not loader_threads()


def test_prefetch_raises_the_error_at_its_place(shard: Shard) -> None:
    class Failing(Loader):
        def batch(self, step: int, micro: int, context: int | None = None) -> Batch:
            if step == 3:
                raise DataError("step 3 is damaged")
            return super().batch(step, micro, context)

    failing = Failing(shard, make_step(1, [30], [16]), seed=4)
    batches = prefetch(failing, ((s, 0) for s in range(9)))
    assert len(list(itertools.islice(batches, 3))) == 3
    with pytest.raises(DataError, match="step 3 is damaged"):
        next(batches)
    assert not loader_threads()
