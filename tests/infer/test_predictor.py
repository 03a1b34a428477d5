"""The predictor: stepping equals pricing, and only priced text can be learned from."""

import dataclasses

import numpy as np
import pytest
import torch

from tiny import TinyRun
from underpar.build import build_predictor, read_artifact
from underpar.data.folder import load_data
from underpar.data.loader import pack_documents
from underpar.errors import RuleError
from underpar.infer.predictor import Predictor

# Largest difference between one row at a time and all at once, in nats, fp32.
STEP_TOLERANCE = 1e-4


@pytest.fixture
def predictor(tiny_run: TinyRun) -> Predictor:
    artifact, _ = read_artifact(tiny_run.folder.artifact_file)
    return build_predictor(artifact, torch.device("cpu"))


@pytest.fixture(scope="module")
def documents(tiny_run: TinyRun) -> list[np.ndarray]:
    shard = load_data(tiny_run.data).val
    return [np.array(shard.doc(i), dtype=np.int64) for i in range(4)]


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
    predictor = build_predictor(dataclasses.replace(artifact, recipe=recipe), torch.device("cpu"))
    state = predictor.state_hash()
    batch, _ = pack_documents(documents[:1], 1, predictor.context)
    before = predictor.nll(batch)
    predictor.adapt(batch)
    assert predictor.state_hash() == state
    assert torch.equal(predictor.nll(batch), before)
