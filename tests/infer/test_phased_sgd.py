"""The pass over priced documents: its steps by the book, its boundaries, and several ranks."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lever_stacks import CPU, randomized, stack_with
from thread_ranks import Broken, Ranks
from underpar.core.runtime import Runtime
from underpar.data.batch import segments_from_starts
from underpar.errors import RecipeError
from underpar.infer.predictor import Predictor
from underpar.levers import lever_module, phased_sgd
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache

ALONE = Runtime(CPU)
RECIPE = stack_with("softcap")
CONTEXT, CHUNK = 16, 40
# Large enough to be seen in fp32.
SETTINGS: dict[str, Any] = {"lr": 0.1, "chunk_tokens": CHUNK, "least_steps": 1}


def lever(**changes: Any) -> phased_sgd.PhasedSGD:
    return phased_sgd.plug(phased_sgd.Settings(**(SETTINGS | changes)), RECIPE.model)


def some_documents(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.append(1, rng.integers(4, 500, n)).astype(np.uint16) for n in lengths]


# 129 tokens with their BOS, so 128 targets: chunks of 40, 40, 40 and 8.
DOCUMENTS = some_documents(30, 3, 50, 0, 36)


def fresh() -> GPT:
    return Predictor(randomized(RECIPE), CPU, []).model


def weights_after(model: GPT) -> dict[str, Tensor]:
    return {name: w.clone() for name, w in model.state_dict().items()}


def by_the_book(lr: float, clip: float) -> dict[str, Tensor]:
    """Spec 5.6 as it stands, every piece of a row on its own."""
    model = fresh().requires_grad_(True)
    stream = np.concatenate([np.append(d, 1) for d in DOCUMENTS]).astype(np.int64)
    num_chunks = math.ceil((len(stream) - 1) / CHUNK)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for j in range(num_chunks - 1):
        optimizer.zero_grad()
        for row in range(CHUNK // CONTEXT):
            begin = j * CHUNK + row * CONTEXT
            cuts = [i for i in range(begin + 1, begin + CONTEXT) if stream[i] == 1]
            for start, end in zip([begin, *cuts], [*cuts, begin + CONTEXT], strict=True):
                nats = piece_nats(model, stream[start : end + 1])
                (nats / (CHUNK // CONTEXT * CONTEXT)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * j / (num_chunks - 1))) / 2
        optimizer.step()
    return weights_after(model)


def piece_nats(model: GPT, tokens: np.ndarray) -> Tensor:
    cache = PackedCache(segments_from_starts(np.array([0]), len(tokens) - 1, CONTEXT))
    logits = model(torch.from_numpy(tokens[:-1]), cache)
    return F.cross_entropy(logits, torch.from_numpy(tokens[1:]), reduction="sum")


@pytest.mark.parametrize("clip", [1e-2, 1e6])
def test_the_steps_are_those_of_the_book(clip: float) -> None:
    model = fresh()
    before = weights_after(model)
    assert lever(clip=clip).train(model, DOCUMENTS, CONTEXT, ALONE) == 3
    after, wanted = weights_after(model), by_the_book(0.1, clip)
    assert any(not torch.equal(before[n], after[n]) for n in before)
    for name, weight in wanted.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-4, atol=1e-6)


def test_the_last_chunk_is_skipped() -> None:
    others = [*DOCUMENTS[:-1], DOCUMENTS[-1].copy()]
    others[-1][-6:] = 77
    results = []
    for documents in (DOCUMENTS, others):
        model = fresh()
        lever().train(model, documents, CONTEXT, ALONE)
        results.append(weights_after(model))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])
    others[0] = others[0].copy()
    others[0][5] = 78
    model = fresh()
    lever().train(model, others, CONTEXT, ALONE)
    assert not torch.equal(model.embedding.weight, results[0]["embedding.weight"])


@pytest.mark.parametrize(
    ("documents", "num_steps"),
    [([], 0), (some_documents(0), 0), (some_documents(39), 0), (some_documents(40), 1)],
)
def test_few_tokens_are_few_steps(documents: list[np.ndarray], num_steps: int) -> None:
    predictor = Predictor(randomized(RECIPE), CPU, [])
    state = predictor.state_hash()
    assert lever().train(predictor.model, documents, CONTEXT, ALONE) == num_steps
    assert (predictor.state_hash() == state) == (num_steps == 0)


@pytest.mark.parametrize("least_steps", [4, 16])
def test_few_tokens_are_small_steps(least_steps: int) -> None:
    num_tokens = sum(len(document) + 1 for document in DOCUMENTS)
    chunk = num_tokens // least_steps
    few, asked = lever(chunk_tokens=10**6, least_steps=least_steps), lever(chunk_tokens=chunk)
    steps = [phases.train(fresh(), DOCUMENTS, CONTEXT, ALONE) for phases in (few, asked)]
    assert steps[0] == steps[1] and least_steps - 1 <= steps[0] <= least_steps + 1


def test_a_chunk_shorter_than_the_context_is_one_row() -> None:
    model = fresh()
    before = model.embedding.weight.clone()
    assert lever(chunk_tokens=10).train(model, DOCUMENTS, 128, ALONE) == 12
    assert not torch.equal(model.embedding.weight, before)


def test_a_zero_rate_leaves_the_weights() -> None:
    predictor = Predictor(randomized(RECIPE), CPU, [])
    state = predictor.state_hash()
    assert lever(lr=0.0).train(predictor.model, DOCUMENTS, CONTEXT, ALONE) == 3
    assert predictor.state_hash() == state


@pytest.mark.parametrize("breaks", [False, True])
def test_flags_and_gradients_are_as_before(breaks: bool) -> None:
    model = fresh()
    model.embedding.weight.requires_grad_(True).grad = torch.ones_like(model.embedding.weight)

    def about() -> list[tuple[bool, int]]:
        return [(p.requires_grad, id(p.grad)) for p in model.parameters()]

    before = about()
    if breaks:
        with pytest.raises(ZeroDivisionError):
            lever().train(model, DOCUMENTS, CONTEXT, Runtime(CPU, 0, 2, transport=Broken()))
    else:
        lever().train(model, DOCUMENTS, CONTEXT, ALONE)
    assert about() == before


@pytest.mark.parametrize("world", [2, 5])
def test_ranks_add_up_to_one(world: int) -> None:
    """A chunk has two rows: of five ranks three have none, and reduce as often as the others."""
    alone, ranks = fresh(), Ranks(world)
    lever().train(alone, DOCUMENTS, CONTEXT, ALONE)
    models = [fresh() for _ in range(world)]
    pairs = zip(models, ranks.runtimes, strict=True)
    ranks.go([partial(lever().train, model, DOCUMENTS, CONTEXT, rank) for model, rank in pairs])
    for model in models:
        for name, weight in weights_after(alone).items():
            torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-4, atol=2e-6)
    # One message per step, which has all gradients.
    num_weights = sum(p.numel() for p in alone.parameters())
    sent = [transport.reduced for transport in ranks.transports]
    assert [[len(grads) for grads in each] for each in sent] == world * [3 * [num_weights]]
    assert sum(bool(first.any()) for first, *_ in sent) == 2


@pytest.mark.parametrize(
    ("prefix", "phases", "num_documents", "ends"),
    [
        (0.05, 1, 50_000, (2500,)),
        (0.05, 3, 50_000, (833, 1666, 2500)),
        (0.07, 1, 100, (7,)),
        (1.0, 2, 10, (5, 10)),
        (0.05, 3, 40, (1, 2)),
        (0.05, 1, 5, ()),
        (0.0, 2, 50_000, ()),
    ],
)
def test_boundaries(prefix: float, phases: int, num_documents: int, ends: tuple[int, ...]) -> None:
    assert lever(prefix=prefix, phases=phases).boundaries(num_documents) == ends


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefix": 1.1},
        {"phases": 0},
        {"chunk_tokens": 0},
        {"least_steps": 0},
        {"lr": -1.0},
        {"momentum": 1.0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    (key,) = wrong
    with pytest.raises(RecipeError, match=rf"levers\.phased_sgd\.{key} = "):
        lever(**wrong)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["softcap", "asym_softcap"])
def test_caps_that_training_leaves_alone_stay(name: str, train: bool) -> None:
    """In PR 2014 neither the loss of training nor that of the phase has a path to the caps."""
    model = Predictor(
        randomized(stack_with(name, settings=lever_module(name).Settings(train=train))), CPU, []
    ).model
    before = weights_after(model)
    assert lever(lr=1.0).train(model, DOCUMENTS, CONTEXT, ALONE) > 0
    after = weights_after(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    caps = {name for name in before if ".cap_" in name}
    assert caps and caps & moved == (caps if train else set())
    assert len(moved - caps) > 10
