"""Every shipped recipe builds at full size and trains at cpu size, with every lever at work."""

import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agreement import network_of
from lever_stacks import CPU, batch_of, randomized
from underpar.build.levers import plug_levers, resolve_levers
from underpar.build.model import build_model, weight_shapes
from underpar.compile.rewrites import REWRITES
from underpar.compile.traced_run import TracedRun
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.data.folder import load_data
from underpar.infer.predictor import Predictor
from underpar.model.network import EAGER, Network
from underpar.recipe import Recipe, list_recipes, load_recipe
from underpar.seams import ModelHook, ModelPlace, methods_of
from underpar.stages.calibrate import calibrate_run, needs_calibration
from underpar.stages.pack import pack_run
from underpar.stages.train import begin_run, make_trainer
from underpar.train.loop import Trainer
from underpar.train.step import mean_loss

# As published.
NUM_PARAMETERS = {
    "pr2014": 35_945_673,
    "pr2135": 35_945_673,
    "pr1894": 35_947_108,
    "pr1493": 35_944_536,
    "pr1219": 30_125_660,
}
STEPS = 8
# Every weight moves and the loss falls with little text, too.
SMALL = ["train.num_micro_batches=1", "train.micro_batch_tokens=512"]
SMALL += ["quant.calibration_batches=2", "quant.calibration_batch_tokens=512"]


@pytest.mark.parametrize("name", list(list_recipes()))
def test_full_size_builds(name: str) -> None:
    recipe = load_recipe(name)
    shapes, spec = weight_shapes(recipe), recipe.model
    if recipe.hnet:
        assert shapes["byte_embedding.weight"] == (spec.vocab_size, recipe.hnet.dim)
    else:
        assert shapes["embedding.weight"] == (spec.vocab_size, spec.dim)
    for stage in ("data", "model", "train", "quant", "infer"):
        plug_levers(recipe, stage)


@pytest.mark.parametrize(("name", "expected"), list(NUM_PARAMETERS.items()))
def test_published_systems_have_the_published_number_of_parameters(
    name: str, expected: int
) -> None:
    shapes = weight_shapes(load_recipe(name))
    assert sum(math.prod(shape) for shape in shapes.values()) == expected


def test_the_small_tokenizer_of_pr1219_is_trained_here(data_for: Callable[[Recipe], Path]) -> None:
    assert load_data(data_for(load_recipe("pr1219"))).tokenizer.vocab_size == 1024


def test_the_baseline_has_no_levers() -> None:
    assert load_recipe("baseline").levers == {}


@pytest.fixture(params=list(list_recipes()), scope="module")
def trained(
    request: pytest.FixtureRequest,
    data_for: Callable[[Recipe], Path],
    tmp_path_factory: pytest.TempPathFactory,
    runtime: Runtime,
) -> tuple[Trainer, Counter[str], dict[str, torch.Tensor]]:
    """A finished trainer at cpu size, calls by lever, and the weights it began with."""
    # Without decay, so that only a gradient can move a weight.
    decays = [f"train.{group}_decay=0" for group in ("matrix", "embed", "scalar")]
    overrides = [f"train.budget_steps={STEPS}", *decays, *SMALL]
    if "window" in load_recipe(request.param).levers:
        overrides.append("levers.window.size=32")
    recipe = resolve_levers(load_recipe(f"{request.param}+cpu", overrides))
    data = data_for(recipe)
    folder = RunFolder(tmp_path_factory.mktemp("runs") / request.param)
    trainer = make_trainer(recipe, load_data(data), folder, runtime)
    begin_run(trainer.folder, recipe, data, load_data(data), runtime)
    calls = count_calls(trainer.model)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert trainer.run()
    if needs_calibration(recipe):
        calibrate_run(folder, load_data(data), runtime)
    return trainer, calls, before


def count_calls(model: Network) -> Counter[str]:
    """Calls of each lever's hooks from here on, as 'lever.seam'."""
    calls: Counter[str] = Counter()
    trunks = model.trunks
    names = {id(lever): name for trunk in trunks for name, lever in trunk.levers.items()}

    def counted(hook: Any) -> Any:
        key = f"{names[id(hook.__self__)]}.{hook.__name__}"

        def call(*args: Any) -> Any:
            calls[key] += 1
            return hook(*args)

        return call

    seams = (*methods_of(ModelHook), *methods_of(ModelPlace))
    for place, seam in ((trunk.hooks, seam) for trunk in trunks for seam in seams):
        hooks = getattr(place, seam)
        if isinstance(hooks, list):
            setattr(place, seam, [counted(hook) for hook in hooks])
        elif hooks is not None:
            setattr(place, seam, counted(hooks))
    for block in (block for trunk in trunks for block in trunk.blocks):
        if block.wiring:
            block.wiring = counted(block.wiring)
        if block.attn.window:
            # Asked for its reach when the model was built.
            calls["window.reach"] += 1
    return calls


def test_cpu_size_trains_with_every_lever_at_work(
    trained: tuple[Trainer, Counter[str], dict[str, torch.Tensor]],
) -> None:
    trainer, calls, before = trained
    model = trainer.model
    levers = {name for trunk in model.trunks for name in trunk.levers}
    assert {key.split(".")[0] for key in calls} == levers
    num_layers = sum(trunk.spec.num_layers for trunk in model.trunks)
    assert ("loop" in levers) == (len(model.plan) > num_layers)
    if "lanes" in levers:
        assert calls["lanes.wire"] > 0 and calls["lanes.finish"] > 0
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == parameter.requires_grad, name


def test_cpu_size_learns_and_fits(
    trained: tuple[Trainer, Counter[str], dict[str, torch.Tensor]],
) -> None:
    folder = trained[0].folder
    losses = [m["loss"] for m in folder.metrics()]
    assert losses[-1] < losses[0]
    assert pack_run(folder).total_bytes <= folder.read_recipe().limits.cap_bytes


@pytest.mark.parametrize("name", list(NUM_PARAMETERS))
def test_lanes_step_as_documents_are_priced(name: str) -> None:
    small = ["levers.window.size=32"] if name == "pr1219" else []
    predictor = Predictor(randomized(load_recipe(f"{name}+cpu", small)), CPU, [])
    # Two lanes; the first takes up a second document where its first one ends.
    lanes = [[40, 60], [101]]
    priced = [[predictor.nll(batch_of([n], 128, seed=n)) for n in lane] for lane in lanes]
    streams = [[batch_of([n], 128, seed=n) for n in lane] for lane in lanes]
    inputs = [torch.cat([b.inputs for b in lane]) for lane in streams]
    targets = [torch.cat([b.targets for b in lane]) for lane in streams]
    stepper = predictor.stepper(2)
    for t in range(102):
        stepper.reset(torch.tensor([t == 41, False]))
        log_probs = stepper.step(torch.stack([lane[t] for lane in inputs]))
        for lane, nats in enumerate(priced):
            stepped = -log_probs[lane, targets[lane][t]]
            assert abs(float(stepped - torch.cat(nats)[t])) < 1e-4


def test_the_loop_is_off_first_and_on_later() -> None:
    model = build_model(load_recipe("pr1894+cpu"))
    lengths = []
    for p in (0.0, 0.41, 0.42, 1.0):
        model.set_progress(p)
        lengths.append(len(model.plan))
    assert lengths == [11, 11, 17, 17]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="inductor needs a C compiler")
def test_inductor_equals_eager_on_pr2014() -> None:
    model = network_of(load_recipe("pr2014+cpu"))
    batch = batch_of([25, 60], 128)
    results = []
    for run in (EAGER, TracedRun(), TracedRun(rewrites=REWRITES)):
        model.zero_grad()
        loss = mean_loss(model, batch, run)
        loss.backward()
        results.append((loss, [p.grad for p in model.parameters() if p.grad is not None]))
    torch._dynamo.reset()
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-3, atol=1e-4)
