"""Straight-through rounding: exact gradients, true weights everywhere else, no second graph."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.func import functional_call

from lever_stacks import batch_of
from thread_ranks import unheard
from underpar.build.levers import lever_settings, plug_levers, resolve_levers
from underpar.build.model import build_model
from underpar.compile import regions as compiled
from underpar.compile.traced_run import TracedRun
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.batch import Batch
from underpar.data.folder import load_data
from underpar.data.loader import MicroBatch
from underpar.data.made_up import made_up_batch
from underpar.errors import RecipeError
from underpar.levers.ste import NEUTRAL, Settings, plug, round_rows
from underpar.model.gpt import GPT
from underpar.model.network import EAGER, Eager
from underpar.quant.rounding import round_tensor
from underpar.quant.schemes import dequantize, parse_scheme
from underpar.recipe import Recipe, load_recipe
from underpar.schema import ModelSpec
from underpar.stages.train import make_trainer
from underpar.train.loop import Trainer
from underpar.train.step import accumulate, mean_loss

CPU = torch.device("cpu")
ALWAYS = Settings(start=0.0)
SHORT = ["model.num_layers=2", "train.budget_steps=6", "train.micro_batch_tokens=256"]
LATE = "levers.ste={start=0.5, bits=4, sigmas=4.0}"


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return build_model(load_recipe("baseline+cpu", ["model.num_layers=2"]))


def trainer_of(data: Path, path: Path, *sets: str) -> Trainer:
    path.mkdir(exist_ok=True)
    recipe = resolve_levers(load_recipe("baseline+cpu", [*SHORT, *sets]))
    return make_trainer(recipe, load_data(data), RunFolder(path), Runtime(CPU))


def rounded_weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: round_rows(weight, 6, 12.85)
        for name, weight in model.state_dict().items()
        if name.startswith("blocks.") and name.endswith(".weight")
    }


@pytest.mark.parametrize("scheme", ["int6:12.85", "int4:6", "int8", "int2:3"])
@pytest.mark.parametrize("shape", [(16, 400), (5, 1), (3, 4, 8)])
def test_rounding_is_that_of_the_packer(scheme: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    weight[1] *= 1e-7
    wanted = parse_scheme(scheme)
    ours = round_rows(weight, wanted.bits, wanted.sigmas).numpy()
    packed = dequantize(round_tensor(weight.numpy(), wanted))
    # Deviations are summed in another order: a step may be the next half.
    assert np.isclose(ours, packed, rtol=2**-10, atol=0).mean() > 0.995
    # The largest value is the same however it is found, and so is all that follows.
    assert wanted.sigmas or np.array_equal(ours, packed)


class Toy(nn.Module):
    """Two layers, the first used twice."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 12, dtype=kind)
        self.last = nn.Linear(12, 3, dtype=kind)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, 12) -> (N, 3)."""
        return self.last(torch.tanh(self.first(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_gradients_are_those_of_the_straight_through_estimator(kind: torch.dtype) -> None:
    toy = Toy(kind)
    x = torch.randn(20, 12, dtype=kind, generator=torch.Generator().manual_seed(1))
    lever = plug(Settings(start=0.0, pattern="*.weight", bits=3, sigmas=3.0), ModelSpec())
    parameters = dict(toy.named_parameters())
    shifted = {
        name: w + (round_rows(w, 3, 3.0) - w).detach() if w.ndim > 1 else w
        for name, w in parameters.items()
    }
    loss = functional_call(toy, shifted, (x,)).square().mean()
    expected = torch.autograd.grad(loss, list(parameters.values()))
    before = {name: w.clone() for name, w in toy.state_dict().items()}
    with lever.fake_quantize(toy.state_dict(), 0.0):
        assert not torch.equal(toy.first.weight, before["first.weight"])
        ours = toy(x).square().mean()
        ours.backward()
    torch.testing.assert_close(ours, loss)
    for (name, parameter), wanted in zip(parameters.items(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted)
        assert torch.equal(parameter, before[name])


def test_only_matrices_that_fit_the_pattern_change(model: GPT) -> None:
    before = {name: w.clone() for name, w in model.state_dict().items()}
    expected = before | rounded_weights(model)
    with plug(ALWAYS, model.spec).fake_quantize(model.state_dict(), 0.0):
        inside = {name: w.clone() for name, w in model.state_dict().items()}
    assert all(torch.equal(inside[name], w) for name, w in expected.items())
    changed = {name for name, w in inside.items() if not torch.equal(w, before[name])}
    # Outputs of blocks start at 0, which is a multiple of anything.
    assert {f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in "qkv"} <= changed
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


@pytest.mark.parametrize(("p", "acts"), [(0.0, False), (0.849, False), (0.85, True), (0.99, True)])
def test_it_acts_late(model: GPT, p: float, acts: bool) -> None:
    weight = model.state_dict()["blocks.0.attn.q.weight"]
    before = weight.clone()
    with plug(Settings(), model.spec).fake_quantize(model.state_dict(), p):
        assert torch.equal(weight, before) != acts


def test_an_error_puts_the_weights_back(model: GPT) -> None:
    before = {name: w.clone() for name, w in model.state_dict().items()}
    with (
        pytest.raises(ZeroDivisionError),
        plug(ALWAYS, model.spec).fake_quantize(model.state_dict(), 0),
    ):
        raise ZeroDivisionError
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


def batches_of(rank: int, world: int) -> Iterator[Batch]:
    rng = np.random.default_rng(0)
    made = [made_up_batch(MicroBatch(64, 32), 512, rng, "documents") for _ in range(4)]
    return iter(made[rank::world])


def test_ranks_add_up_to_the_gradients_of_one(model: GPT) -> None:
    def gradients(runtime: Runtime) -> dict[str, Tensor]:
        model.zero_grad()
        with plug(ALWAYS, model.spec).fake_quantize(model.state_dict(), 0.0):
            accumulate(
                model,
                batches_of(runtime.rank, runtime.world),
                [0.25] * (4 // runtime.world),
                runtime,
            )
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(Runtime(CPU))
    # The sum over ranks, taken here by hand.
    parts = [gradients(unheard(rank, 2)) for rank in range(2)]
    summed = {name: parts[0][name] + parts[1][name] for name in expected}
    torch.testing.assert_close(summed, expected)


@pytest.fixture(scope="module")
def plain(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run without the lever."""
    trainer = trainer_of(tiny_data, tmp_path_factory.mktemp("plain"), "levers.ema=true")
    assert trainer.run()
    return trainer


@pytest.fixture(scope="module")
def late(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run whose second half is rounded."""
    trainer = trainer_of(tiny_data, tmp_path_factory.mktemp("late"), "levers.ema=true", LATE)
    assert trainer.run()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.folder.metrics()]


def same_weights(a: Trainer, b: Trainer) -> bool:
    ours, theirs = (read_tensors(t.folder.checkpoint_file)[0] for t in (a, b))
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_neutral_setting_is_the_run_without_it(
    plain: Trainer, tiny_data: Path, tmp_path: Path
) -> None:
    sets = ["levers.ema=true", f"levers.ste.start={NEUTRAL.start}"]
    neutral = trainer_of(tiny_data, tmp_path, *sets)
    assert len(neutral.fake_quantizers) == 1 and not plain.fake_quantizers
    assert neutral.run()
    assert losses(neutral) == losses(plain)
    assert same_weights(neutral, plain)


def test_a_run_changes_where_it_starts_and_not_before(plain: Trainer, late: Trainer) -> None:
    # Step 4 is the first at 0.5 of the run.
    assert losses(late)[:3] == losses(plain)[:3]
    assert losses(late)[3] != losses(plain)[3]
    assert not same_weights(late, plain)


def test_true_weights_are_stepped_averaged_and_saved(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tiny_data, tmp_path, "levers.ema=true", "train.checkpoint_seconds=0", LATE)
    name = "blocks.1.attn.q.weight"
    weight = trainer.model.state_dict()[name]
    seen: dict[str, list[bool]] = {"pass": [], "step": [], "average": []}

    def is_rounded(value: Tensor) -> bool:
        # Four bits: a row is made of at most 15 numbers.
        return max(len(row.unique()) for row in value) <= 15

    def watch(kind: str, owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def watched(*args: Any) -> Any:
            seen[kind].append(is_rounded(weight))
            return inner(*args)

        monkeypatch.setattr(owner, method, watched)

    trainer.runner = Eager()
    watch("pass", trainer.runner, "end")
    watch("step", trainer.optimizer, "step")
    watch("average", trainer.averagers[0], "update")
    assert trainer.run()
    # Two micro-batches a step, three steps of six.
    assert seen["pass"] == [False] * 6 + [True] * 6
    assert seen["step"] == seen["average"] == [False] * 6
    saved, _ = read_tensors(trainer.folder.checkpoint_file)
    assert torch.equal(saved[f"model/{name}"], weight)
    assert not is_rounded(saved[f"model/{name}"])
    assert not is_rounded(saved[f"average0/{name}"])


def test_a_run_that_was_stopped_inside_resumes_bit_for_bit(
    late: Trainer, tiny_data: Path, tmp_path: Path
) -> None:
    sets = ("levers.ema=true", LATE)
    stopped = trainer_of(tiny_data, tmp_path, *sets)
    assert not stopped.run(lambda line: line["step"] == 5)
    again = trainer_of(tiny_data, tmp_path, *sets)
    assert again.run()
    assert losses(again) == losses(late)
    assert same_weights(again, late)


def test_a_failing_pass_leaves_the_true_weights(tiny_data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_data, tmp_path, "levers.ste.start=0.0")
    before = {name: w.clone() for name, w in trainer.model.state_dict().items()}

    class Failing(Eager):
        """Runs out of memory in every pass."""

        def end(self, *args: Any) -> Any:
            raise MemoryError

    trainer.runner = Failing()
    with pytest.raises(MemoryError):
        trainer.run()
    assert all(torch.equal(w, before[name]) for name, w in trainer.model.state_dict().items())


def test_penalties_read_the_true_weights(tiny_data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_data, tmp_path, "levers.ste.start=0.0")
    weight = trainer.model.state_dict()["blocks.0.attn.q.weight"]
    true, seen, passes = weight.clone(), [], []

    class Reader:
        """Remembers what it read."""

        def penalty(self, model: nn.Module, step: int, p: float) -> Tensor | None:
            seen.append(weight.clone())
            return model.get_parameter("blocks.0.attn.q.weight").sum()

    class Watched(Eager):
        """Remembers the weight of every pass."""

        def end(self, *args: Any) -> Any:
            passes.append(weight.clone())
            return super().end(*args)

    trainer.penalties.append(Reader())
    trainer.runner = Watched()
    assert not trainer.run(lambda line: True)
    assert len(seen) == 1 and torch.equal(seen[0], true)
    assert len(passes) == 2 and not any(torch.equal(passed, true) for passed in passes)


def test_with_loops_and_other_levers_it_trains(tiny_data: Path, tmp_path: Path) -> None:
    sets = ["levers.loop={first=1, last=1, start=0.5}", "levers.qat_lite={layers=[1], every=1}"]
    rounded = trainer_of(tiny_data, tmp_path / "rounded", *sets, LATE)
    assert rounded.run()
    without = trainer_of(tiny_data, tmp_path / "without", *sets)
    assert without.run()
    assert losses(rounded)[:3] == losses(without)[:3]
    assert np.isfinite(losses(rounded)).all() and losses(rounded)[3] != losses(without)[3]


def test_compiled_it_acts_without_another_graph(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def compiler(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(compiled, "inductor", compiler)
    torch._dynamo.reset()
    lever = plug(Settings(start=0.5, bits=3, sigmas=3.0), model.spec)
    nn.init.normal_(model.get_parameter("blocks.0.attn.o.weight"), std=0.1)
    batch = batch_of([25, 60], 128)

    def gradient(run: Eager, p: float) -> Tensor:
        model.zero_grad()
        with lever.fake_quantize(model.state_dict(), p):
            mean_loss(model, batch, run).backward()
        grad = model.get_parameter("blocks.0.attn.q.weight").grad
        assert grad is not None
        return grad.clone()

    run = TracedRun()
    before = gradient(run, 0.0)
    num_graphs = len(graphs)
    after = gradient(run, 0.6)
    torch._dynamo.reset()
    assert len(graphs) == num_graphs > 0
    torch.testing.assert_close(before, gradient(EAGER, 0.0), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(after, gradient(EAGER, 0.6), rtol=1e-3, atol=1e-6)
    assert not torch.allclose(before, after, rtol=0.01, atol=1e-6)


@pytest.mark.slow
def test_two_ranks_train_like_one(late: Trainer, tiny_data: Path, tmp_path: Path) -> None:
    sets = [word for s in (*SHORT, "levers.ema=true", LATE) for word in ("--set", s)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    out = ["--data", str(tiny_data), "--out", str(tmp_path), "--device", "cpu", "--json"]
    command = ["-m", "underpar", "train", "baseline+cpu", *out, *sets]
    subprocess.run([*launcher, *command], check=True, capture_output=True)
    logged = [line["loss"] for line in RunFolder(tmp_path).metrics()]
    assert logged == pytest.approx(losses(late), abs=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"start": -0.1}, r"levers.ste.start = -0.1: expected 0 to 1"),
        ({"bits": 1}, "levers.ste.bits = 1: expected 2 to 8"),
        ({"sigmas": -1.0}, "levers.ste.sigmas = -1.0: expected 0 to 1000"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        Settings(**values)
    assert "\n" not in str(caught.value)


def test_a_pattern_that_fits_nothing_is_refused_in_the_first_step(
    tiny_data: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(tiny_data, tmp_path, "levers.ste.pattern='block.*.weight'")
    with pytest.raises(RecipeError, match=r"'block\.\*\.weight' fits no matrix"):
        trainer.run()


def test_a_recipe_takes_it() -> None:
    recipe: Recipe = load_recipe("baseline", ["levers.ste=true"])
    assert lever_settings(recipe)["ste"] == Settings()
    assert list(plug_levers(recipe, "train")) == ["ste"]
