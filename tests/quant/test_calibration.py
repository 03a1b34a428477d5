"""Calibration: what the matrices meet, over training text alone, and a model left as it was."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from thread_ranks import unheard
from underpar.audit.clock import OVERSHOOT
from underpar.build.levers import resolve_levers
from underpar.build.model import build_model
from underpar.core.runtime import Runtime
from underpar.data.batch import Batch
from underpar.data.folder import DataFolder, load_data
from underpar.data.loader import Loader, MicroBatch
from underpar.errors import ArtifactError, RecipeError, RuleError
from underpar.infer.predictor import Predictor
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.quant.calibration import HEAD, Calibration, SelfGenerated, TrainingText, collect
from underpar.recipe import Recipe, load_recipe

NUM_LAYERS, VISITS = 3, (1, 3, 1)
SETS = [f"model.num_layers={NUM_LAYERS}", "levers.loop={first=1, last=1, start=0.5}"]
SETS += ["levers.lanes.start=2", "levers.xsa=true", "levers.smear.init=0.3"]
BATCH_TOKENS = 300


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return resolve_levers(load_recipe("baseline+cpu", SETS))


@pytest.fixture(scope="module")
def data(tiny_data: Path) -> DataFolder:
    return load_data(tiny_data)


@pytest.fixture(scope="module")
def text(data: DataFolder) -> TrainingText:
    return TrainingText(data, num_batches=4, batch_tokens=BATCH_TOKENS)


@pytest.fixture
def model(recipe: Recipe) -> GPT:
    """A model whose every weight matters, in the middle of training, its loop off."""
    torch.manual_seed(0)
    model = build_model(recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.set_progress(0.1)
    return model


@pytest.fixture
def calibration(model: GPT, text: TrainingText, runtime: Runtime) -> Calibration:
    return collect(model, text, runtime)


def test_one_hessian_for_each_input(calibration: Calibration) -> None:
    assert len(calibration.hessians) == len(calibration.num_inputs) == 6 * NUM_LAYERS + 1
    assert len({id(h) for h in calibration.hessians.values()}) == 4 * NUM_LAYERS + 1
    for layer in range(NUM_LAYERS):
        q, k, v = (calibration.hessians[f"blocks.{layer}.attn.{letter}.weight"] for letter in "qkv")
        assert q is k is v
    for hessian in calibration.hessians.values():
        assert hessian.dtype == torch.float32
        assert torch.equal(hessian, hessian.T)
        values = torch.linalg.eigvalsh(hessian.double())
        assert values[-1] > 0 and values[0] > -1e-6 * values[-1]


def test_every_visit_of_every_token_counts(calibration: Calibration) -> None:
    assert calibration.num_tokens == 4 * BATCH_TOKENS
    for layer, visits in enumerate(VISITS):
        for site in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down"):
            assert (
                calibration.num_inputs[f"blocks.{layer}.{site}.weight"]
                == visits * calibration.num_tokens
            )
    assert calibration.num_inputs[HEAD] == calibration.num_tokens


@torch.no_grad()
def test_hessians_are_those_of_every_product_with_the_weight(
    model: GPT, text: TrainingText, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    looped = collect(model, text, runtime)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sums = {name: torch.zeros(h.shape, dtype=torch.double) for name, h in looped.hessians.items()}
    linear = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = names.get(id(weight), "")
        if name in sums:
            sums[name] += x.double().T @ x.double()
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    model.eval().set_progress(1.0)
    for batch in text.batches(model.spec.context, runtime):
        model(batch.inputs, PackedCache(batch.segments))
    for name, expected in sums.items():
        torch.testing.assert_close(looped.hessians[name].double(), expected, rtol=1e-4, atol=1e-3)
        rms = (expected.diagonal() / looped.num_inputs[name]).sqrt().float()
        torch.testing.assert_close(looped.rms(name), rms, rtol=1e-4, atol=1e-5)


def test_logits_are_not_made(
    model: GPT, text: TrainingText, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "head", lambda x: pytest.fail("nothing needs logits"))
    assert collect(model, text, runtime).num_tokens


def test_twice_the_same_is_the_same_bits(
    calibration: Calibration, model: GPT, text: TrainingText, runtime: Runtime
) -> None:
    again = collect(model, text, runtime)
    assert all(torch.equal(again.hessians[name], h) for name, h in calibration.hessians.items())
    other = collect(model, replace(text, seed=1), runtime)
    assert not torch.equal(other.hessians[HEAD], calibration.hessians[HEAD])


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_add_up_to_the_whole(
    world: int,
    calibration: Calibration,
    model: GPT,
    text: TrainingText,
) -> None:
    ranks = [unheard(rank, world) for rank in range(world)]
    shares = [collect(model, text, rank) for rank in ranks]
    # Hessians, counts and maxima: a message each, from every rank.
    assert [len(rank.transport.reduced) for rank in ranks] == [3] * world
    assert sum(share.num_tokens for share in shares) == calibration.num_tokens
    for name, hessian in calibration.hessians.items():
        total = torch.stack([share.hessians[name] for share in shares]).sum(0)
        torch.testing.assert_close(total, hessian, rtol=1e-4, atol=1e-3)
        assert sum(share.num_inputs[name] for share in shares) == calibration.num_inputs[name]
        # Batches do not depend on the ranks that read them, up to the last bits of a sum.
        largest = max(share.largest[name] for share in shares)
        assert largest == pytest.approx(calibration.largest[name], rel=1e-5) and largest > 0


def state_of(model: GPT) -> tuple[object, ...]:
    """Everything about a model that reading a text could change, but for its weights."""
    modules = [(m.training, len(m._forward_hooks)) for m in model.modules()]
    asking = [(p.requires_grad, p.grad is None, p.data_ptr()) for p in model.parameters()]
    return modules, asking, model.plan, torch.get_float32_matmul_precision()


@pytest.mark.parametrize("breaks", [False, True])
def test_the_model_comes_back_as_it_was(
    breaks: bool,
    model: GPT,
    text: TrainingText,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model.train()
    model.blocks[0].eval()
    about, random = state_of(model), torch.get_rng_state()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    if breaks:
        # In the middle of a pass, with every hook in place.
        monkeypatch.setattr(model, "finish", lambda stream: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            collect(model, text, runtime)
    else:
        collect(model, text, runtime)
    assert state_of(model) == about
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_a_model_that_diverged_is_refused(model: GPT, text: TrainingText, runtime: Runtime) -> None:
    with torch.no_grad():
        model.blocks[0].attn.v.weight[0, 0] = torch.nan
    with pytest.raises(ArtifactError, match=r"blocks\.0\.attn\.o\.weight are NaN"):
        collect(model, text, runtime)


def held_out_batches(data: DataFolder) -> Iterator[Batch]:
    yield Loader(data.val, [MicroBatch(100, 128)], 0).batch(0, 0)


FORBIDDEN: list[tuple[str, Callable[[DataFolder], Any]]] = [
    ("Shard", lambda data: TrainingText(data.val)),  # type: ignore[arg-type]
    ("the manifest says", lambda data: TrainingText(replace(data, train=data.val))),
    ("generator", held_out_batches),
    ("Loader", lambda data: Loader(data.val, [MicroBatch(100, 128)], 0)),
]


@pytest.mark.parametrize(("said", "forbidden"), FORBIDDEN, ids=[said for said, _ in FORBIDDEN])
def test_the_held_out_text_cannot_be_named(
    said: str,
    forbidden: Callable[[DataFolder], Any],
    data: DataFolder,
    model: GPT,
    runtime: Runtime,
) -> None:
    with pytest.raises(RuleError, match=f"calibration was given .*{said}"):
        collect(model, forbidden(data), runtime)


def test_the_text_is_training_text_in_another_order(data: DataFolder, runtime: Runtime) -> None:
    (batch,) = TrainingText(data, 1, 4000).batches(128, runtime)
    known = {tuple(data.train.doc(i).tolist()) for i in range(data.train.num_documents)}
    starts = torch.nonzero(batch.inputs == 1)[:, 0].tolist()
    documents = [tuple(batch.inputs[i:j].tolist()) for i, j in pairwise(starts)]
    assert len(documents) > 3 and known.issuperset(documents)
    # Attention is cut at every document.
    assert set(starts) <= set(batch.segments.cu.tolist())
    assert batch.segments.context == 128
    for seed in (0, 1337):
        trained_on = Loader(data.train, [MicroBatch(4000, 128)], seed).batch(0, 0)
        assert not torch.equal(trained_on.inputs, batch.inputs)


@pytest.mark.parametrize("name", ["num_batches", "batch_tokens"])
def test_no_text_is_refused(name: str, text: TrainingText) -> None:
    with pytest.raises(RecipeError, match=f"{name} = 0: expected more than 0"):
        replace(text, **{name: 0})


@pytest.mark.parametrize("name", ["num_batches", "num_lanes", "lane_tokens", "temperature"])
def test_nothing_written_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name} = 0: expected more than 0"):
        SelfGenerated(lambda num: CountingLanes(num, 40), **{name: 0})


class CountingLanes:
    """Lanes in which each token is followed by the next id, and the last id by a new document."""

    def __init__(self, num_lanes: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.resets: list[list[bool]] = []

    def step(self, tokens: Tensor) -> Tensor:
        following = torch.where(tokens == self.vocab_size - 1, 1, tokens + 1)
        return F.one_hot(following, self.vocab_size).float().log()

    def reset(self, lanes: Tensor) -> None:
        self.resets.append(lanes.tolist())


def test_a_model_writes_on_from_a_random_token(runtime: Runtime) -> None:
    opened: list[CountingLanes] = []

    def open_lanes(num_lanes: int) -> CountingLanes:
        opened.append(CountingLanes(num_lanes, 40))
        return opened[-1]

    text = SelfGenerated(open_lanes, num_batches=2, num_lanes=6, lane_tokens=30)
    batches = list(text.batches(16, runtime))
    firsts = set()
    for batch, lanes in zip(batches, opened, strict=True):
        tokens = batch.inputs.view(6, 30).numpy()
        assert (tokens[:, 0] == 1).all() and (tokens[:, 1] >= 4).all()
        firsts |= set(tokens[:, 1].tolist())
        before, after = tokens[:, 1:-1], tokens[:, 2:]
        np.testing.assert_array_equal(after, np.where(before == 39, 1, before + 1))
        # Every BOS that is read begins a document: for the lane, and for attention.
        np.testing.assert_array_equal(np.array(lanes.resets).T, tokens[:, :-1] == 1)
        starts = np.flatnonzero(tokens == 1).tolist()
        assert len(starts) > 6 and set(starts) <= set(batch.segments.cu.tolist())
        assert batch.segments.max_len == 16
    assert len(firsts) > 6


def test_temperature_sharpens(runtime: Runtime) -> None:
    class Coin:
        def step(self, tokens: Tensor) -> Tensor:
            probs = torch.zeros(len(tokens), 8)
            probs[:, 6], probs[:, 7] = 1 / 3, 2 / 3
            return probs.log()

        def reset(self, lanes: Tensor) -> None:
            """One state."""

    text = SelfGenerated(lambda num: Coin(), 1, num_lanes=100, lane_tokens=102, temperature=0.5)
    (batch,) = text.batches(128, runtime)
    written = batch.inputs.view(100, 102)[:, 2:]
    # Squared odds; five deviations.
    assert float((written == 7).float().mean()) == pytest.approx(0.8, abs=0.02)


def test_what_is_sampled_is_not_counted(model: GPT, runtime: Runtime) -> None:
    predictor = Predictor(model, runtime.device, [])
    text = SelfGenerated(predictor.stepper, num_batches=2, num_lanes=3, lane_tokens=20)
    first, again = (collect(model, text, runtime) for _ in range(2))
    assert first.num_tokens == first.num_inputs["blocks.0.attn.o.weight"] == 2 * 3 * 20
    assert all(torch.equal(again.hessians[name], h) for name, h in first.hessians.items())


# One H200 reads 16 batches of 65,536 tokens, with the backward pass of 4, in 4.1 s.
SECONDS_PER_TOKEN = 4.1 / (16 * 65_536)


@pytest.mark.parametrize("name", ["pr2014", "pr2135", "pr1894", "pr1219"])
def test_calibrations_take_the_seconds_that_are_kept_for_them(name: str) -> None:
    def fits(recipe: Recipe, num_ranks: int) -> bool:
        num_batches = -(-recipe.quant.calibration_batches // num_ranks)
        num_tokens = num_batches * recipe.quant.calibration_batch_tokens
        part = recipe.train
        allowed = part.reserve_seconds + OVERSHOOT * part.budget_seconds
        return num_tokens * SECONDS_PER_TOKEN <= allowed

    assert fits(load_recipe(name), 8)
    assert fits(load_recipe(f"{name}+one-gpu"), 1)


def test_one_gpu_reads_fewer_tokens_than_eight() -> None:
    whole, one = (load_recipe(name).quant for name in ("pr1219", "pr1219+one-gpu"))
    assert whole.calibration_batches * whole.calibration_batch_tokens == 2**24
    assert one.calibration_batches * one.calibration_batch_tokens == 2**20
