"""The predictor: stepping equals pricing, and only priced text can be learned from."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from lever_stacks import batch_of, randomized, stack_with
from tiny import TinyRun
from underpar.artifact.unpack import Artifact
from underpar.build.artifact import read_artifact
from underpar.build.levers import plug_levers
from underpar.build.model import build_predictor
from underpar.data.batch import Batch, pack_documents
from underpar.data.folder import load_data
from underpar.errors import RuleError
from underpar.infer import predictor as predictor_module
from underpar.infer.predictor import Predictor
from underpar.levers import lever_module

# Largest difference between one row at a time and all at once, in nats, fp32.
STEP_TOLERANCE = 1e-4

CPU = torch.device("cpu")
SMALL = stack_with("softcap")


def adapting(artifact: Artifact) -> Predictor:
    """The predictor with all adapters of its recipe."""
    return build_predictor(artifact, CPU, list(plug_levers(artifact.recipe, "infer").values()))


def small_predictor(**levers: dict[str, float]) -> Predictor:
    """A small random model with these adapters, in this order."""
    adapters = []
    for name, settings in levers.items():
        module = lever_module(name)
        adapters.append(module.plug(module.Settings(**settings), SMALL.model))
    return Predictor(randomized(SMALL), CPU, adapters)


@pytest.fixture
def predictor(tiny_run: TinyRun) -> Predictor:
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    return adapting(artifact)


@pytest.fixture(scope="module")
def documents(tiny_run: TinyRun) -> list[np.ndarray]:
    shard = load_data(tiny_run.data).val
    return [np.array(shard.doc(i), dtype=np.int64) for i in range(4)]


def test_one_function_computes_every_probability() -> None:
    source = Path(predictor_module.__file__).parents[1]
    calls = {
        str(path.relative_to(source))
        for part in ("infer", "score", "codec", "build", "audit", "stages")
        for path in (source / part).rglob("*.py")
        if "softmax(" in path.read_text()
    }
    # Sampling divides log-probabilities by a temperature.
    assert calls == {"infer/predictor.py", "infer/generate.py"}
    assert Path(predictor_module.__file__).read_text().count("softmax(") == 1


def test_stepping_equals_pricing_past_the_context(
    predictor: Predictor, documents: list[np.ndarray]
) -> None:
    shortest = min(len(d) for d in documents)
    assert shortest > 2 * predictor.context, "documents must outgrow the context"
    batch, owner = pack_documents(documents, 1, predictor.context)
    priced = predictor.nll(batch)
    stepper = predictor.stepper(len(documents))
    for t in range(2 * predictor.context + 5):
        tokens = torch.tensor([d[t] for d in documents])
        log_probs = stepper.step(tokens)
        for lane, document in enumerate(documents):
            first = int(np.searchsorted(owner, lane))
            stepped = -log_probs[lane, document[t + 1]]
            assert abs(float(stepped - priced[first + t])) < STEP_TOLERANCE


def test_lanes_do_not_see_each_other(predictor: Predictor, documents: list[np.ndarray]) -> None:
    def run(other: int) -> torch.Tensor:
        stepper = predictor.stepper(2)
        outs = [
            stepper.step(torch.tensor([documents[0][t], documents[other][t]])) for t in range(20)
        ]
        return torch.stack(outs)[:, 0]

    assert torch.equal(run(1), run(2))


def test_a_reset_lane_begins_anew(predictor: Predictor, documents: list[np.ndarray]) -> None:
    stepper = predictor.stepper(2)
    first = stepper.step(torch.tensor([1, 1]))
    for t in range(5):
        stepper.step(torch.tensor([int(documents[0][t]), int(documents[1][t])]))
    stepper.reset(torch.tensor([True, False]))
    again = stepper.step(torch.tensor([1, 1]))
    torch.testing.assert_close(again[0], first[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(again[1], first[1])


def test_only_priced_text_can_be_learned_from(
    predictor: Predictor, documents: list[np.ndarray]
) -> None:
    first, _ = pack_documents(documents[:1], 1, predictor.context)
    second, _ = pack_documents(documents[1:2], 1, predictor.context)
    with pytest.raises(RuleError, match="not been priced"):
        predictor.adapt(first)
    predictor.nll(first)
    with pytest.raises(RuleError, match="not been priced"):
        predictor.adapt(second)
    predictor.adapt(first)
    with pytest.raises(RuleError, match="not been priced"):
        predictor.adapt(first)


def test_adapting_changes_the_scales_and_nothing_else(
    predictor: Predictor, documents: list[np.ndarray]
) -> None:
    before = {name: t.clone() for name, t in predictor.model.state_dict().items()}
    batch, _ = pack_documents(documents, 1, predictor.context)
    predictor.nll(batch)
    predictor.adapt(batch)
    after = predictor.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    ends = ("cap_both", "attn_scale", "mlp_scale")
    scales = {n for n in before if n.endswith(ends)}
    assert len(scales) == 1 + 2 * predictor.model.spec.num_layers
    assert changed == scales


def test_a_zero_rate_is_no_adaptation(tiny_run: TinyRun, documents: list[np.ndarray]) -> None:
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    still = dict(artifact.recipe.levers) | {"adapt_scales": {"lr": 0.0, "cap_lr": 0.0}}
    recipe = dataclasses.replace(artifact.recipe, levers=still)
    predictor = adapting(dataclasses.replace(artifact, recipe=recipe))
    state = predictor.state_hash()
    batch, _ = pack_documents(documents[:1], 1, predictor.context)
    before = predictor.nll(batch)
    predictor.adapt(batch)
    assert predictor.state_hash() == state
    assert torch.equal(predictor.nll(batch), before)


@pytest.mark.parametrize("rows", [1, 7, 10**6])
def test_further_tokens_are_priced_with_the_targets(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = small_predictor()
    batch = batch_of([20, 31], predictor.context)
    logs = predictor.log_probs(batch)
    tokens = torch.randint(0, 500, (len(logs), 3), generator=torch.Generator().manual_seed(0))
    tokens[::2, 1] = -1
    monkeypatch.setattr(predictor_module, "ROWS", rows)
    priced = predictor.price(batch, tokens)
    assert priced.shape == (len(logs), 4)
    assert priced.dtype == torch.float32
    wanted = torch.cat((batch.targets[:, None], tokens), dim=1)
    alike = logs.gather(1, wanted.clamp(min=0)).where(wanted >= 0, torch.zeros(()))
    torch.testing.assert_close(priced, alike, rtol=0, atol=1e-5)
    assert (priced[::2, 2] == 0).all()
    assert (priced <= 0).all()
    torch.testing.assert_close(predictor.nll(batch), -priced[:, 0], rtol=0, atol=0)
    assert torch.equal(predictor.price(batch), priced[:, :1])


def test_a_certain_token_costs_nothing_and_never_less() -> None:
    predictor = small_predictor()
    with torch.no_grad():
        predictor.model.embedding.weight[7] *= 1e3
    batch = batch_of([40], predictor.context)
    priced = predictor.price(batch, torch.full((len(batch.targets), 1), 7))
    assert priced.max() == 0


def test_pricing_further_tokens_is_pricing() -> None:
    predictor = small_predictor(stream_sgd={})
    batch = batch_of([30], predictor.context)
    predictor.price(batch, batch.targets[:, None])
    predictor.adapt(batch)
    with pytest.raises(RuleError, match="not been priced"):
        predictor.adapt(batch)


def test_half_precision_is_close_and_stays_out_of_the_logits() -> None:
    batch = batch_of([20, 31], 128)
    model = randomized(SMALL)
    full = Predictor(model, CPU, []).nll(batch)
    half = Predictor(model, CPU, [], torch.bfloat16)
    nats = half.nll(batch)
    assert nats.dtype == torch.float32
    assert not torch.equal(nats, full)
    torch.testing.assert_close(nats, full, rtol=0, atol=0.2)
    stepped = half.stepper(1).step(batch.inputs[:1])
    assert stepped.dtype == torch.float32
    torch.testing.assert_close(stepped, half.log_probs(batch)[:1], rtol=0, atol=0.05)


def test_weights_that_adapt_in_half_precision_stay_whole() -> None:
    model = randomized(SMALL)
    module = lever_module("stream_sgd")
    adapter = module.plug(module.Settings(), SMALL.model)
    predictor = Predictor(model, CPU, [adapter], torch.bfloat16)
    batch = batch_of([60], 128)
    before = predictor.nll(batch).mean()
    predictor.adapt(batch)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert predictor.nll(batch).mean() < before


def test_one_backward_pass_serves_all_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = predictor_module.backward

    def counted(model: torch.nn.Module, *rest: object) -> None:
        asked.append(sum(p.requires_grad for p in model.parameters()))
        real(model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(predictor_module, "backward", counted)
    predictor = small_predictor(adapt_scales={}, ttt_e2e={"epochs": 1, "share": 1.0})
    batch = batch_of([30], predictor.context)
    predictor.nll(batch)
    predictor.adapt(batch)
    num_layers = SMALL.model.num_layers
    scales, mlps = 1 + 2 * num_layers, 2 * num_layers
    assert asked == [scales + mlps]
    asked.clear()
    # Passes are shared as long as each has epochs left.
    predictor = small_predictor(adapt_scales={}, ttt_e2e={"epochs": 3, "share": 1.0})
    predictor.nll(batch)
    predictor.adapt(batch)
    assert asked == [scales + mlps, mlps, mlps]
    assert not any(p.requires_grad or p.grad is not None for p in predictor.model.parameters())


def test_adapters_side_by_side_learn_as_alone() -> None:
    """After one shared pass each has made the step that it makes alone."""
    batch = batch_of([60], 128)
    adapted = []
    for levers in (("adapt_scales",), ("ttt_e2e",), ("adapt_scales", "ttt_e2e")):
        predictor = small_predictor(
            **{name: {"epochs": 1} if name == "ttt_e2e" else {} for name in levers}
        )
        predictor.nll(batch)
        predictor.adapt(batch)
        adapted.append(predictor.model.state_dict())
    start = randomized(SMALL).state_dict()
    for name, weight in adapted[2].items():
        alone = next((a[name] for a in adapted[:2] if not torch.equal(a[name], start[name])), None)
        wanted = start[name] if alone is None else alone
        torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-7)


def test_a_tensor_belongs_to_the_first_adapter_that_names_it() -> None:
    still = {"lr": 0.0, "cap_lr": 0.0}
    predictor = small_predictor(adapt_scales=still, adapt_bias={"lr": 0.0}, stream_sgd={})
    before = {name: w.clone() for name, w in predictor.model.state_dict().items()}
    batch = batch_of([60], predictor.context)
    predictor.nll(batch)
    predictor.adapt(batch)
    after = predictor.model.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    ends = ("cap_both", "attn_scale", "mlp_scale", "adapt_bias.bias")
    assert same == {name for name in before if name.endswith(ends)}


def test_a_saved_state_goes_on_as_if_nothing_had_been() -> None:
    names = {"adapt_scales": {}, "adapt_bias": {}, "stream_sgd": {"horizon_chunks": 4}}
    batches = [batch_of([60], 128, seed) for seed in range(3)]

    def learn(predictor: Predictor, batch: Batch) -> None:
        predictor.nll(batch)
        predictor.adapt(batch)

    straight, other = small_predictor(**names), small_predictor(**names)
    start = {name: t.clone() for name, t in straight.state().items()}
    for batch in batches[:2]:
        learn(straight, batch)
    saved = {name: t.clone() for name, t in straight.state().items()}
    learn(straight, batches[2])
    other.nll(batches[0])
    other.load(saved)
    with pytest.raises(RuleError, match="not been priced"):
        other.adapt(batches[0])
    learn(other, batches[2])
    assert other.state_hash() == straight.state_hash()
    # From the start again: velocities and steps are forgotten too.
    again = small_predictor(**names)
    other.load(start)
    for predictor in (again, other):
        learn(predictor, batches[0])
    assert other.state_hash() == again.state_hash()
