"""SGD on chunks of sliding windows: against a loop written from the description, and over ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lane_runs import make_shard
from lever_stacks import CPU, randomized
from thread_ranks import Ranks
from underpar.core.runtime import Clock, Runtime
from underpar.data.batch import Batch, segments_from_starts
from underpar.data.shards import Shard
from underpar.infer.predictor import Predictor
from underpar.infer.sgd import SGD, Descent
from underpar.levers import stream_sgd, ttt_e2e
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.recipe import ScorePart, load_recipe
from underpar.score.ledger import Score
from underpar.score.method import Method
from underpar.score.scorer import Scorer

CONTEXT = 16
SIZES = {"vocab_size": 64, "dim": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 32}
SIZES |= {"num_layers": 2, "context": CONTEXT}
RECIPE = load_recipe("cpu", [f"model.{key}={value}" for key, value in SIZES.items()])
SHARD = make_shard([37, 2, 1, 16, 40, 61])
NUM_TARGETS = SHARD.num_tokens - 1
FLAT = Method(stride=4, flat=True)
PART = ScorePart(batch_tokens=64, adapt_tokens=32)
FALLING = Descent(lr=0.2, epochs=3, cosine=True)


def scored(
    descent: Descent,
    method: Method = FLAT,
    part: ScorePart = PART,
    runtime: Runtime | None = None,
    shard: Shard = SHARD,
    model: GPT | None = None,
) -> tuple[np.ndarray, Score, GPT]:
    """Nats of every target of the stream, the score, and the model after it."""
    runtime, model = runtime or Runtime(CPU), model or randomized(RECIPE)
    predictor = Predictor(model, CPU, [SGD(descent, ("*",))])
    nats = np.full(shard.num_tokens - 1, np.nan)

    def enter(document: int, first: int, prices: np.ndarray) -> None:
        begin = int(shard.starts[document]) + first
        nats[begin : begin + len(prices)] = prices

    scorer = Scorer(predictor, shard, runtime, Clock(), part, method, adapts=True, on_commit=enter)
    return nats, scorer.run(), model


def losses(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """Nats of a row of tokens after the first, in one window."""
    inputs, targets = tokens[:-1], tokens[1:]
    segments = segments_from_starts(np.array([0]), len(inputs), CONTEXT)
    batch = Batch(inputs, targets, segments)
    hidden = model.hidden(batch.inputs, PackedCache(batch.segments))
    return F.cross_entropy(model.head(hidden).float(), targets, reduction="none")


def by_the_book(descent: Descent, stride: int, chunk: int) -> np.ndarray:
    """PR 549 and PR 1413: windows of a chunk, then its rows of whole windows, epoch by epoch."""
    model = randomized(RECIPE)
    tokens = torch.from_numpy(SHARD.tokens.astype(np.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=descent.lr, momentum=descent.momentum)
    nats, num_chunks = np.full(NUM_TARGETS, np.nan), math.ceil(NUM_TARGETS / chunk)
    # (first input, end, first target that is owned)
    windows = [(0, min(CONTEXT, NUM_TARGETS), 0)]
    while windows[-1][1] < NUM_TARGETS:
        start, end, _ = windows[-1]
        windows.append((start + stride, min(end + stride, NUM_TARGETS), end))
    for k in range(num_chunks):
        for start, end, owned in windows:
            if owned // chunk == k:
                with torch.no_grad():
                    nats[owned:end] = losses(model, tokens[start : end + 1])[owned - start :]
        if k == num_chunks - 1:
            break
        rate = descent.lr
        if descent.cosine:
            rate *= (1 + math.cos(math.pi * k / (num_chunks - 1))) / 2
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(descent.epochs):
            optimizer.zero_grad()
            begins = range(k * chunk, (k + 1) * chunk, CONTEXT)
            rows = [losses(model, tokens[begin : begin + CONTEXT + 1]) for begin in begins]
            torch.stack(rows).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), descent.clip)
            optimizer.step()
    return nats


@pytest.mark.parametrize("descent", [FALLING, replace(FALLING, epochs=1, cosine=False)])
@pytest.mark.parametrize(("stride", "chunk"), [(4, 32), (16, 32), (8, 16)])
def test_chunks_are_those_of_the_book(descent: Descent, stride: int, chunk: int) -> None:
    part = replace(PART, adapt_tokens=chunk)
    nats, score, _ = scored(descent, replace(FLAT, stride=stride), part)
    expected = by_the_book(descent, stride, chunk)
    np.testing.assert_allclose(nats, expected, rtol=1e-4, atol=1e-4)
    still, _, _ = scored(replace(descent, lr=0.0), replace(FLAT, stride=stride), part)
    np.testing.assert_allclose(nats[:chunk], still[:chunk], atol=1e-5)
    assert np.abs(nats[chunk:] - still[chunk:]).max() > 0.01
    kinds = [kind for kind, _, _ in score.events]
    assert kinds == ["price", "adapt"] * math.ceil(NUM_TARGETS / chunk)


@pytest.mark.parametrize("stride", [3, 5, 16])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("chunk", [7, 50, 1000])
def test_any_windows_and_chunks_price_every_target_once(
    flat: bool, stride: int, chunk: int
) -> None:
    method = Method(stride=stride, flat=flat)
    part = replace(PART, adapt_tokens=chunk)
    still, score, _ = scored(Descent(lr=0.0), method, part)
    assert score.num_targets == NUM_TARGETS and not np.isnan(still).any()
    plain = Scorer(
        Predictor(randomized(RECIPE), CPU, []), SHARD, Runtime(CPU), Clock(), part, method
    ).run()
    assert score.bits == pytest.approx(plain.bits, rel=1e-6)
    moved, _, _ = scored(Descent(lr=0.2), method, part)
    assert (np.abs(moved - still).max() > 0.01) == (chunk < NUM_TARGETS)


@pytest.mark.parametrize("method", [FLAT, Method(stride=4), Method()], ids=lambda m: m.label)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_windows_and_give_the_same_score(method: Method, world: int) -> None:
    alone, score, model = scored(FALLING, method)
    ranks = Ranks(world)
    models = [randomized(RECIPE) for _ in range(world)]
    calls = [
        lambda r=r, m=m: scored(FALLING, method, runtime=r, model=m)
        for r, m in zip(ranks.runtimes, models, strict=True)
    ]
    for nats, shared, learnt in ranks.go(calls):
        np.testing.assert_allclose(nats, alone, rtol=1e-4, atol=1e-4)
        assert shared.events == score.events
        same_weights(learnt, models[0], 0.0)
        same_weights(learnt, model, 1e-4)
    if method.stride:
        # Two lessons in the first chunk, or more: two ranks had gradients of their own to send.
        sent = [transport.reduced[0] for transport in ranks.transports]
        shares = [share for share in sent if share.any()]
        assert len(shares) >= 2 and not torch.allclose(shares[0], shares[1])


def same_weights(ours: GPT, theirs: GPT, tolerance: float) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_a_rate_over_the_whole_text_costs_the_number_of_chunks() -> None:
    _, told, _ = scored(FALLING)
    num_chunks = math.ceil(NUM_TARGETS / PART.adapt_tokens)
    _, set_, _ = scored(replace(FALLING, cosine=False, horizon_chunks=num_chunks))
    assert (told.side_bits, set_.side_bits) == (32.0, 0.0)
    assert told.bits == set_.bits + 32.0


def test_the_defaults_are_published_values() -> None:
    def values(settings: Descent) -> Sequence[float]:
        return settings.lr, settings.epochs, settings.momentum, settings.clip

    assert values(stream_sgd.Settings()) == (0.005, 3, 0.9, 1.0)
    best = ttt_e2e.Settings()
    assert (*values(best), best.share) == (0.015, 2, 0.9, 1.0, 0.5)
