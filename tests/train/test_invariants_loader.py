"""The invariants of the published loader at its own sizes, and the first loss.

Number 14, a reader that rejects a wrong magic, version or size, is held for both file formats in
tests/data/test_shards.py and tests/data/test_published.py; smaller cases of 11 to 13 are in
tests/data/test_loader.py and tests/data/test_order.py, and 17, the clock, is in test_loop.py.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from underpar.build.model import build_model
from underpar.core.runtime import Runtime, seed_everything
from underpar.data.batch import Batch
from underpar.data.loader import Loader, MicroBatch, make_step
from underpar.data.made_up import made_up_batch
from underpar.data.shards import Shard
from underpar.recipe import load_recipe
from underpar.seams import BOS_ID
from underpar.train.feed import Feed
from underpar.train.step import mean_loss, step_of

CPU = torch.device("cpu")
PART = load_recipe("pr2014").train
STEP_TOKENS = 8 * 98_304


def shard_of(lengths: np.ndarray) -> Shard:
    """Documents of so many random tokens, their BOS counted."""
    tokens = np.random.default_rng(1).integers(4, 8192, lengths.sum()).astype(np.uint16)
    starts = np.cumsum(lengths) - lengths
    tokens[starts] = BOS_ID
    hashes, flags = np.zeros((len(lengths), 32), np.uint8), np.zeros(len(lengths), np.uint8)
    return Shard(tokens, starts, lengths, hashes, flags)


@pytest.fixture(scope="module")
def shard() -> Shard:
    """A step and a half of documents, many short, some longer than any context."""
    drawn = np.random.default_rng(0).lognormal(6, 1.3, 2000).astype(np.int64) + 1
    enough = int(np.searchsorted(np.cumsum(drawn), 1.5 * STEP_TOKENS))
    return shard_of(drawn[:enough])


def batches_of(shard: Shard, world: int, num_steps: int, context: int | None) -> list[list[Batch]]:
    """What each rank is fed, in the order in which it asks."""
    feeds = []
    for rank in range(world):
        feed = Feed(Loader(shard, step_of(PART), PART.seed), Runtime(CPU, rank, world))
        batches = feed.at(0, context)
        feeds.append([next(batches) for _ in range(num_steps * 8 // world)])
        feed.close()
    return feeds


def in_stream_order(feeds: list[list[Batch]]) -> list[Batch]:
    """Micro-batches of all ranks: rank 0's first, rank 1's first, ... rank 0's second, ..."""
    return [batch for turn in zip(*feeds, strict=True) for batch in turn]


@pytest.mark.parametrize("context", [1024, 2048, 3072])
def test_11_ranks_spans_are_contiguous_and_cut_as_published(shard: Shard, context: int) -> None:
    """Unlike the published loader, ours drops no token between spans: a target is the next input.

    There every rank reads 98,305 tokens, so the last target of a span is no input of any rank.
    """
    batches = in_stream_order(batches_of(shard, 8, 1, context))
    inputs, targets = (torch.cat([getattr(b, k) for b in batches]) for k in ("inputs", "targets"))
    assert len(inputs) == STEP_TOKENS
    assert torch.equal(inputs[1:], targets[:-1])
    longest = 0
    for batch in batches:
        cu = batch.segments.cu
        assert len(batch.inputs) == 98_304 and len(cu) % 64 == 0
        assert cu[0] == 0 and cu[-1] == 98_304
        lengths = cu.diff()
        assert lengths.min() >= 0 and lengths.max() <= context
        longest = max(longest, int(lengths.max()))
        # A BOS is where its segment begins, so every BOS is a cut.
        assert torch.isin(torch.nonzero(batch.inputs == BOS_ID).flatten(), cu).all()
    assert longest == context


def test_12_one_rank_sees_the_spans_of_eight_whatever_the_epoch(shard: Shard) -> None:
    """Eight ranks and eight micro-batches of one rank are the same stream, also at a shard's end.

    The published loader takes the tokens of a shard in their order, whatever the seed, and skips
    the rest of a shard that is shorter than a step. Ours has no such end, and shuffles documents by
    the seed, on purpose: seeds then differ in their data too, as an independent repeat should.
    """
    alone, eight = (in_stream_order(batches_of(shard, world, 3, 2048)) for world in (1, 8))
    assert len(alone) == len(eight) == 24
    for one, other in zip(alone, eight, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert torch.equal(one.segments.cu, other.segments.cu)
    first = Loader(shard, step_of(PART), PART.seed + 1).batch(0, 0)
    assert not torch.equal(first.inputs, alone[0].inputs)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("plan", [make_step(8, [13], [5]), [MicroBatch(101, 16)]])
def test_13_no_document_repeats_before_all_were_seen(seed: int, plan: list[MicroBatch]) -> None:
    """What the coprime stride gives PR 1219 for blocks, a shuffle gives us for documents."""
    lengths = np.arange(1, 40)
    loader = Loader(shard_of(lengths), plan, seed)
    num_steps = -(-3 * int(lengths.sum()) // loader.step_tokens)
    places = itertools.product(range(num_steps), range(len(plan)))
    stream = torch.cat([loader.batch(*place).inputs for place in places])
    bounds = torch.nonzero(stream == BOS_ID).flatten()[: 3 * len(lengths) + 1]
    # All lengths differ, so a length names its document.
    seen = bounds.diff().reshape(3, -1)
    assert bounds[0] == 0
    for epoch in seen:
        assert sorted(epoch.tolist()) == lengths.tolist()
    assert seen[0].tolist() != seen[1].tolist()


def test_18_the_first_loss_is_that_of_a_guess() -> None:
    """The first of the published losses, 9.009: ln 8192, whatever the text.

    The next four (12.8, 10.2, 8.7, 7.9) are those of the published text at full batch.
    """
    recipe = load_recipe("pr2014")
    seed_everything(42)
    model = build_model(recipe)
    model.set_progress(0.0)
    rng = np.random.default_rng(0)
    batch = made_up_batch(MicroBatch(1024, 1024), 8192, rng, recipe.train.order)
    with torch.no_grad():
        loss = float(mean_loss(model, batch))
    assert loss == pytest.approx(math.log(8192), abs=0.02)
