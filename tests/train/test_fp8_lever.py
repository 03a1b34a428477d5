"""Training with products of 8-bit floats: what is rounded, by which scales, and what is not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lever_stacks import batch_of
from underpar.build.model import build_model
from underpar.compile.regions import Sharing
from underpar.compile.rewrites import REWRITES
from underpar.compile.traced_run import TracedRun
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.folder import load_data
from underpar.errors import LeverError, RecipeError
from underpar.lab.step_bench import Variant, open_sides, require_agreement
from underpar.levers import fp8
from underpar.model.network import EAGER, Eager, as_scored
from underpar.recipe import load_recipe
from underpar.stages.train import make_trainer, train
from underpar.train.step import mean_loss

RECIPE = load_recipe("cpu", ["model.num_layers=2"])
BATCH = batch_of([40, 60], 128)


def equipped(**settings: Any) -> tuple[Any, fp8.Lever]:
    torch.manual_seed(0)
    model = build_model(RECIPE)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # A power of 2, so that rounding is the same where it is folded into a weight.
            weight.fill_(0.5) if name.endswith("_scale") else weight.normal_(std=0.05)
    lever = fp8.Lever(fp8.Settings(**settings), RECIPE.model)
    lever.equip(model)
    return model, lever


def test_training_alone_is_rounded() -> None:
    model, _ = equipped()
    plain, _ = equipped(mlp=False)
    plain.hooks.adjust.clear()
    losses = [mean_loss(network, BATCH) for network in (model, plain)]
    assert 1e-6 < abs(float((losses[0] - losses[1]).detach())) < 0.05
    with as_scored(model), as_scored(plain), torch.no_grad():
        assert torch.equal(mean_loss(model, BATCH), mean_loss(plain, BATCH))
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_values_are_rounded_and_gradients_are_those_of_the_plain_product() -> None:
    x, weight = (torch.randn(n, 16, requires_grad=True) for n in (5, 24))
    scales = [t.detach().abs().amax() / fp8.LARGEST for t in (x, weight)]
    y = fp8.fp8_linear(x, weight, *scales)
    factors = [fp8.rounded(t, s).double() * s for t, s in zip((x, weight), scales, strict=True)]
    torch.testing.assert_close(y.double(), factors[0] @ factors[1].T, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight), grad)
    torch.testing.assert_close(found, (grad @ weight, grad.T @ x))


def test_what_is_larger_than_before_is_clamped() -> None:
    x = torch.tensor([1.0, -3.0, 100.0])
    assert fp8.rounded(x, torch.tensor(1 / 448)).float().tolist() == [448.0, -448.0, 448.0]


def test_scales_follow_the_largest_of_earlier_steps() -> None:
    model, lever = equipped(steps=2)
    # What was seen before the first step is that of a warm-up.
    lever.seen[0].fill_(7.0)
    scales = []
    for largest in (448.0, 44.8, 4.48, 4.48):
        lever.begin_step()
        scales.append(float(model.blocks[0].mlp.up.fp8_scale))
        lever.seen[0].fill_(largest)
    lever.begin_step()
    scales.append(float(model.blocks[0].mlp.up.fp8_scale))
    assert scales == pytest.approx([1.0, 1.0, 1.0, 0.1, 0.01])


def test_every_micro_batch_counts() -> None:
    model, lever = equipped()
    lever.begin_step()
    mean_loss(model, BATCH)
    first = torch.stack(lever.seen)
    assert (first > 0).all()
    mean_loss(model, batch_of([20], 128, seed=1))
    assert (torch.stack(lever.seen) >= first).all()


@pytest.mark.parametrize("head", [True, False])
def test_compiled_training_sees_and_rounds_the_same(head: bool) -> None:
    found = []
    backend = torch._dynamo.lookup_backend("aot_eager_default_partitioner")
    # Without the head, the scales of branches may be folded into the weights of products.
    rewrites = REWRITES[:1] if not head else ()
    run: Eager = TracedRun(Sharing(lambda graph, examples: backend(graph, examples)), rewrites)
    for runner in (EAGER, run):
        model, lever = equipped(head=head)
        for _ in range(2):
            lever.begin_step()
            model.zero_grad()
            loss = mean_loss(model, BATCH, runner)
            loss.backward()
        # Folded into a weight, a scale gets the gradient of the product that was not rounded.
        named = {n: p for n, p in model.named_parameters() if head or not n.endswith("_scale")}
        grads = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        found.append((loss.detach(), torch.stack(lever.seen), grads))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_a_resumed_run_rounds_alike(tiny_data: Path, tmp_path: Path, runtime: Runtime) -> None:
    words = ["model.num_layers=1", "train.budget_steps=8", "levers.fp8.steps=3"]
    recipe, data = load_recipe("cpu", words), load_data(tiny_data)
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    train(recipe, tiny_data, whole, runtime)
    trainer = make_trainer(recipe, data, cut, runtime)
    assert not trainer.run(lambda line: line["step"] == 4)
    assert make_trainer(recipe, data, cut, runtime).run()
    ours, theirs = (read_tensors(folder.weights_file)[0] for folder in (cut, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_step_with_it_is_compared_with_its_reference() -> None:
    tiny = ("model.num_layers=1", "train.micro_batch_tokens=256", "levers.fp8.steps=2")
    variant = Variant("baseline+cpu", tiny)
    [side] = open_sides([variant], 0.0, Runtime(torch.device("cpu")))
    for _ in range(3):
        side()
    assert require_agreement(side, side)["errors"]["A"]["all"] < 1e-3


def test_a_gpu_without_8_bit_floats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lever = fp8.Lever(fp8.Settings(), RECIPE.model)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")

    class Weight:
        shape, device = (32, 16), torch.device("cuda")

    with pytest.raises(LeverError, match=r"A100 has compute capability 8\.0.*need 8\.9"):
        lever._refuse([Weight()])  # type: ignore[list-item]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    lever._refuse([Weight()])  # type: ignore[list-item]
    Weight.shape = (32, 24)
    with pytest.raises(LeverError, match="no multiples of 16"):
        lever._refuse([Weight()])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"mlp": False, "head": False}, "neither mlp nor head"), ({"steps": 0}, "fp8.steps = 0")],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        fp8.Settings(**settings)


def test_the_operator_is_well_registered() -> None:
    x, weight = (torch.randn(n, 16, requires_grad=True) for n in (5, 24))
    scale = torch.tensor(0.01)
    args = (x, weight, fp8.rounded(x, scale), fp8.rounded(weight, scale), scale, scale)
    # The check of the schema compares arguments by arithmetic that e4m3 does not have.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.underpar.fp8_linear.default, args, test_utils=tests)
