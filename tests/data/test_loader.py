"""Batches: the stream rule, ranks, resuming, segments, prefetching and packs for scoring."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.data.loader import (
    Batch,
    Loader,
    Segments,
    micros_of_rank,
    pack_documents,
    prefetch,
    segments_from_starts,
)
from underpar.data.shards import Shard, ShardWriter, open_shard
from underpar.errors import DataError, RecipeError

# Every token but the BOS is different, so a stream tells which documents it holds.
LENGTHS = [3, 1, 17, 40, 2, 9, 25, 1, 64, 5]
VOCAB_SIZE = 1000


def make_shard(folder: Path, lengths: list[int]) -> Shard:
    with ShardWriter(folder / "t.shard", VOCAB_SIZE) as writer:
        next_id = itertools.count(2)
        for length in lengths:
            tokens = np.array(list(itertools.islice(next_id, length)), dtype=np.int32)
            writer.add(tokens, length, "00" * 32)
    return open_shard(folder / "t.shard", VOCAB_SIZE)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Shard:
    return make_shard(tmp_path_factory.mktemp("loader"), LENGTHS)


def same(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a.inputs, b.inputs)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.segments.cu, b.segments.cu)
        and torch.equal(a.segments.positions, b.segments.positions)
        and a.segments.max_len == b.segments.max_len
    )


def stream_of(loader: Loader, num_tokens: int) -> torch.Tensor:
    num_batches = -(-num_tokens // loader.micro_batch_tokens)
    places = (divmod(i, loader.num_micro_batches) for i in range(num_batches))
    return torch.cat([loader.batch(*place).inputs for place in places])[:num_tokens]


def documents_in(stream: torch.Tensor) -> list[tuple[int, ...]]:
    bounds = [*torch.nonzero(stream == 1).flatten().tolist(), len(stream)]
    return [tuple(stream[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("micro_batch_tokens", [1, 7, 64, 177, 1000])
def test_each_epoch_holds_every_document_once(shard: Shard, micro_batch_tokens: int) -> None:
    loader = Loader(shard, micro_batch_tokens, 2, context=16, seed=3)
    total = shard.num_tokens
    stream = stream_of(loader, 3 * total)
    wanted = sorted(tuple(shard.doc(i).tolist()) for i in range(shard.num_documents))
    epochs = [documents_in(stream[e * total : (e + 1) * total]) for e in range(3)]
    assert all(sorted(epoch) == wanted for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("micro_batch_tokens", [7, 64, 500])
def test_targets_are_the_next_tokens_of_the_stream(shard: Shard, micro_batch_tokens: int) -> None:
    loader = Loader(shard, micro_batch_tokens, 3, context=16, seed=0)
    stream = stream_of(loader, 10 * micro_batch_tokens)
    for i in range(9):
        batch = loader.batch(*divmod(i, 3))
        begin = i * micro_batch_tokens
        assert torch.equal(batch.inputs, stream[begin : begin + micro_batch_tokens])
        assert torch.equal(batch.targets, stream[begin + 1 : begin + micro_batch_tokens + 1])
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64


def test_the_stream_does_not_depend_on_how_it_is_cut(shard: Shard) -> None:
    streams = [
        stream_of(Loader(shard, tokens, micros, context, seed=5), 400)
        for tokens, micros, context in ((10, 1, 8), (33, 4, 512), (400, 2, 1))
    ]
    assert torch.equal(streams[0], streams[1]) and torch.equal(streams[0], streams[2])


def test_any_number_of_ranks_sees_the_same_global_batch(shard: Shard) -> None:
    alone = Loader(shard, 30, 8, context=16, seed=1)
    for world_size in (1, 2, 4, 8):
        seen: dict[int, Batch] = {}
        for rank in range(world_size):
            loader = Loader(shard, 30, 8, context=16, seed=1)
            for micro in micros_of_rank(8, rank, world_size):
                assert micro not in seen
                seen[micro] = loader.batch(5, micro)
        assert all(same(seen[micro], alone.batch(5, micro)) for micro in range(8))


def test_ranks_that_do_not_divide_the_step_are_refused() -> None:
    with pytest.raises(RecipeError, match="8 micro-batches a step cannot be shared by 3 ranks"):
        micros_of_rank(8, 0, 3)


def test_a_resumed_loader_continues_as_the_first_would(shard: Shard) -> None:
    first = Loader(shard, 50, 2, context=16, seed=9)
    batches = [first.batch(step, micro) for step in range(12) for micro in range(2)]
    resumed = Loader(shard, 50, 2, context=16, seed=9)
    again = [resumed.batch(step, micro) for step in range(7, 12) for micro in range(2)]
    assert all(map(same, batches[14:], again))
    assert same(batches[0], first.batch(0, 0))


def test_the_seed_decides_the_order(shard: Shard) -> None:
    orders = {tuple(stream_of(Loader(shard, 177, 1, 16, seed), 177).tolist()) for seed in range(5)}
    assert len(orders) == 5


def test_the_order_is_the_same_in_every_version(shard: Shard) -> None:
    # A new numpy or a rewrite must not silently change what a seed means.
    docs = documents_in(stream_of(Loader(shard, 177, 1, 16, seed=0), 177))
    index_of = {tuple(shard.doc(i).tolist()): i for i in range(shard.num_documents)}
    assert [index_of[doc] for doc in docs] == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


def test_num_epochs_counts_passes(shard: Shard) -> None:
    loader = Loader(shard, shard.num_tokens, 4, context=16, seed=0)
    assert [loader.num_epochs(step) for step in (0, 1, 3)] == [0.0, 4.0, 12.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"micro_batch_tokens": 0}, "micro_batch_tokens is 0, expected at least 1"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0, expected at least 1"),
        ({"context": -1}, "context is -1, expected at least 1"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
    ],
)
def test_bad_settings_are_refused(shard: Shard, changed: dict[str, int], message: str) -> None:
    values = {"micro_batch_tokens": 8, "num_micro_batches": 1, "context": 8, "seed": 0}
    with pytest.raises(RecipeError, match=message):
        Loader(shard, **(values | changed))


def test_an_empty_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="shard is empty"):
        Loader(make_shard(tmp_path, []), 8, 1, 8, 0)


def slow_segments(starts: set[int], num_tokens: int, context: int) -> tuple[list[int], list[int]]:
    cu: list[int] = []
    positions: list[int] = []
    for i in range(num_tokens):
        if i == 0 or i in starts or positions[-1] + 1 == context:
            cu.append(i)
        positions.append(i - cu[-1])
    return [*cu, num_tokens], positions


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 60), st.integers(1, 70), st.data())
def test_segments_follow_the_rule(num_tokens: int, context: int, data: st.DataObject) -> None:
    starts = data.draw(st.sets(st.integers(0, num_tokens - 1)))
    mask = np.isin(np.arange(num_tokens), list(starts))
    cu, positions = slow_segments(starts, num_tokens, context)
    for given_starts in (mask, np.array(sorted(starts), dtype=np.int64)):
        segments = segments_from_starts(given_starts, num_tokens, context)
        assert segments.cu.tolist() == cu and segments.cu.dtype == torch.int32
        assert segments.positions.tolist() == positions
        assert segments.positions.dtype == torch.int64
        assert segments.max_len == max(positions) + 1 <= context


def test_a_batch_is_cut_at_its_documents(shard: Shard) -> None:
    batch = Loader(shard, 100, 1, context=16, seed=2).batch(1, 0)
    starts = set(torch.nonzero(batch.inputs == 1).flatten().tolist())
    cu, positions = slow_segments(starts, 100, 16)
    assert batch.segments.cu.tolist() == cu
    assert batch.segments.positions.tolist() == positions


def test_a_batch_moves_to_a_device_whole(shard: Shard) -> None:
    batch = Loader(shard, 20, 1, context=8, seed=2).batch(0, 0).to("meta")
    assert isinstance(batch.segments, Segments)
    tensors = (batch.inputs, batch.targets, batch.segments.cu, batch.segments.positions)
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert batch.segments.max_len == 8


def test_prefetch_gives_the_batches_in_order(shard: Shard) -> None:
    loader = Loader(shard, 30, 2, context=16, seed=4)
    places = [(step, micro) for step in range(9) for micro in range(2)]
    fetched = list(prefetch(loader, iter(places)))
    assert len(fetched) == 18
    assert all(
        same(batch, loader.batch(*place)) for batch, place in zip(fetched, places, strict=True)
    )
    assert list(prefetch(loader, [])) == []


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("underpar-loader")]


def test_prefetch_runs_two_ahead_and_stops_when_closed(shard: Shard) -> None:
    asked: list[int] = []

    def endless() -> Iterator[tuple[int, int]]:
        for step in itertools.count():
            asked.append(step)
            yield step, 0

    batches = prefetch(Loader(shard, 30, 1, context=16, seed=4), endless())
    next(batches)
    assert asked == [0, 1, 2] and loader_threads()
    batches.close()  # type: ignore[attr-defined]
    assert asked == [0, 1, 2] and not loader_threads()


def test_prefetch_raises_the_error_at_its_place(shard: Shard) -> None:
    class Failing(Loader):
        def batch(self, step: int, micro: int) -> Batch:
            if step == 3:
                raise DataError("step 3 is damaged")
            return super().batch(step, micro)

    batches = prefetch(Failing(shard, 30, 1, context=16, seed=4), ((s, 0) for s in range(9)))
    assert len(list(itertools.islice(batches, 3))) == 3
    with pytest.raises(DataError, match="step 3 is damaged"):
        next(batches)
    assert not loader_threads()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 9))
def test_packs_score_every_document_by_itself(lengths: list[int], context: int) -> None:
    docs = [np.array([1, *range(2, 2 + n)], dtype=np.uint16) for n in lengths]
    batch, owner = pack_documents(docs, 1, context)
    cuts = set(np.cumsum([0, *(len(doc) for doc in docs[:-1])]).tolist())
    cu, positions = slow_segments(cuts, len(batch.inputs), context)
    assert batch.segments.cu.tolist() == cu
    assert batch.segments.positions.tolist() == positions
    for index, doc in enumerate(docs):
        mine = torch.from_numpy(owner == index)
        assert batch.inputs[mine].tolist() == doc.tolist()
        assert batch.targets[mine].tolist() == [*doc[1:].tolist(), 1]
    assert len(owner) == sum(map(len, docs))


@pytest.mark.parametrize("docs", [[], [np.array([5, 6])], [np.array([], dtype=np.int64)]])
def test_packs_need_documents_that_start_with_bos(docs: list[np.ndarray]) -> None:
    with pytest.raises(AssertionError):
        pack_documents(docs, 1, 8)
