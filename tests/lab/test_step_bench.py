"""Training steps of two sides: what is compared, what is refused, what a result says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from lever_stacks import batch_of
from underpar.compile import regions
from underpar.core.runtime import Runtime
from underpar.errors import BenchError, UnderparError
from underpar.lab import step_bench
from underpar.lab.bench_report import rows_of, sentence_of, write_bench
from underpar.lab.step_bench import (
    StepResult,
    TrainingStep,
    Variant,
    compare_steps,
    cut,
    open_sides,
    read_variants,
    require_agreement,
)

TINY = ("model.num_layers=2", "model.dim=16", "model.mlp_dim=32", "model.vocab_size=64")
TINY += ("train.micro_batch_tokens=256", "train.num_micro_batches=2", "levers.smear=true")
HARMLESS = """
import types

def _forward(mlp, x, visit):
    h = mlp.up(x).relu()
    return mlp.down(h * h)

def apply(network, recipe):
    for block in network.blocks:
        block.mlp.forward = types.MethodType(_forward, block.mlp)
"""
# Little enough for a rounding error of bf16, and too much for one of fp32.
WRONG = HARMLESS.replace("h * h", "1.0005 * h * h")
# Sums in another order.
HALVES = HARMLESS.replace(
    "mlp.down(h * h)",
    "sum(a @ b.T for a, b in zip((h * h).split(7, 1), mlp.down.weight.split(7, 1)))",
)
LAZY = HARMLESS.replace("mlp.down(h * h)", "mlp.down((h * h).detach())")


@pytest.fixture(autouse=True)
def _no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "inductor", lambda graph, examples: graph)
    monkeypatch.setattr(
        step_bench, "sharing_in", lambda mode: regions.Sharing(lambda graph, examples: graph)
    )


def runtime(compiled: bool = False) -> Runtime:
    return Runtime(torch.device("cpu"), compiled=compiled)


def sides_of(*variants: Variant, compiled: bool = False, at: float = 0.0) -> list[TrainingStep]:
    return open_sides(variants, at, runtime(compiled))


def plain(*overrides: str, **fields: Any) -> Variant:
    return Variant("baseline+cpu", (*TINY, *overrides), **fields)


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[..., tuple[Path, ...]]:
    def write(*texts: str) -> tuple[Path, ...]:
        paths = [tmp_path / f"made_up_{abs(hash(text))}.py" for text in texts]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        return tuple(paths)

    return write


def measure(*sides: TrainingStep) -> StepResult:
    return compare_steps(sides, quads=4, block_seconds=0.001, warmup_seconds=0.0)[0]


def test_a_candidate_that_computes_the_same_is_timed(
    candidate: Callable[..., tuple[Path, ...]], tmp_path: Path
) -> None:
    a, b = sides_of(plain(), plain(candidates=candidate(HARMLESS)), compiled=True)
    before = {name: weight.clone() for name, weight in a.model.state_dict().items()}
    result = measure(a, b)
    assert result.check["same_function"] and result.num_graphs > 0 and result.processes == 1
    assert len(result.bench.blocks) == 4 * 4 * 2
    speeds = [result.sides[letter]["tokens_per_second"] for letter in "AB"]
    assert all(speed > 0 for speed in speeds)
    assert result.sides["A"]["step_tokens"] == 512 and result.sides["A"]["visits"] == 2
    # Steps were taken.
    assert any(bool((before[n] != w).any()) for n, w in a.model.state_dict().items())
    write_bench(tmp_path / "out", result.bench, result.details())
    page = (tmp_path / "out/bench.md").read_text()
    assert "tokens/s" in page and sentence_of(result.bench) in page
    ET.parse(tmp_path / "out/bench.svg")
    names = [name for name, _ in rows_of(result.bench, result.details())]
    assert {"step of A", "step of B", "control, A against A"} <= set(names)


def test_another_order_of_sums_is_no_error(candidate: Callable[..., tuple[Path, ...]]) -> None:
    a, b = sides_of(plain(), plain(candidates=candidate(HALVES)))
    before = {name: weight.clone() for name, weight in a.weights().items()}
    errors = require_agreement(a, b)["errors"]
    assert 0 < errors["B"]["all"] < 1e-5 and errors["B"] != errors["A"]
    # The draws of the noise leave the weights as they were.
    assert all(torch.equal(weight, before[name]) for name, weight in a.weights().items())


def test_limits_refuse_what_noise_does_not_explain() -> None:
    torch.manual_seed(0)
    refused = {"few": 0, "many": 0}
    exact = {"few": torch.ones(4), "many": torch.ones(500)}
    for _ in range(300):
        draws = {name: torch.randn(step_bench.DRAWS, len(t)) for name, t in exact.items()}
        noise = {n: float(d.square().sum(1).mean().sqrt()) for n, d in draws.items()}
        for factor in (1.0, 1.6):
            for name, tensor in exact.items():
                errors = {name: factor * float(torch.randn(len(tensor)).norm())}
                try:
                    step_bench.require_small("B", errors, noise, exact, torch.float32)
                except BenchError:
                    # Noise like that of A is never refused.
                    assert factor > 1.0
                    refused[name] += 1
    # 1.6 times the noise shows in a matrix, and cannot in four numbers.
    assert refused["many"] == 300 and refused["few"] < 30


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("text", "words"), [(WRONG, "not the same function"), (LAZY, "mlp.up")])
def test_a_candidate_that_computes_something_else_is_not_timed(
    candidate: Callable[..., tuple[Path, ...]], text: str, words: str, compiled: bool
) -> None:
    a, b = sides_of(plain(), plain(candidates=candidate(text)), compiled=compiled)
    with pytest.raises(BenchError, match=words):
        measure(a, b)


def test_a_wrong_step_is_refused_as_a_and_as_another_function(
    candidate: Callable[..., tuple[Path, ...]],
) -> None:
    wrong = candidate(HARMLESS.replace("h * h", "3.0 * h * h"))
    a, b = sides_of(plain(candidates=wrong), plain("train.matrix_lr=0.5", candidates=wrong))
    with pytest.raises(BenchError, match="A is wrong"):
        measure(a, b)
    [right] = sides_of(plain())
    assert right.claims() != b.claims()
    with pytest.raises(BenchError, match="B is wrong"):
        measure(right, b)


def test_sides_of_one_mode_share_their_graphs(candidate: Callable[..., tuple[Path, ...]]) -> None:
    text = HARMLESS.replace("network.blocks", "network.blocks[:1]")
    twice = sides_of(plain(), plain(), compiled=True)
    other = sides_of(plain(), plain(candidates=candidate(text)), compiled=True)
    assert step_bench.num_graphs(*other) == step_bench.num_graphs(*twice) + 1


def test_sides_differ_in_their_rewrites() -> None:
    without, folded, all_that_fit = sides_of(
        plain(rewrites="none"), plain(rewrites="folded_scales"), plain(), compiled=True
    )
    assert without.run.rewrites == frozenset() and folded.run.rewrites == {"folded_scales"}
    # On a GPU the loss too.
    assert all_that_fit.describe(1.0)["rewrites"] == ["folded_scales", "fused_skips"]
    assert all_that_fit.variant.label(without.variant) == "baseline+cpu"
    assert without.variant.label(folded.variant) == "baseline+cpu + rewrites none"
    for side in (folded, all_that_fit):
        assert require_agreement(without, side)["same_function"]
    with pytest.raises(UnderparError, match="runs on CUDA only"):
        sides_of(plain(rewrites="linear_loss"), compiled=True)
    with pytest.raises(UnderparError, match="not compiled"):
        sides_of(plain(rewrites="fused_skips"))


def test_a_candidate_that_a_rewrite_passes_by_is_refused(
    candidate: Callable[..., tuple[Path, ...]],
) -> None:
    text = HARMLESS.replace("block.mlp.forward =", "block.mlp_branch =")
    with pytest.raises(BenchError, match=r"block\.mlp_branch, which folded_scales does not call"):
        sides_of(plain(candidates=candidate(text)), compiled=True)


def test_candidates_add_up_and_only_one_has_the_loss(
    candidate: Callable[..., tuple[Path, ...]],
) -> None:
    half = "def apply(network, recipe):\n    pass\n\ndef loss(network, stream, *rest):\n"
    half += "    return 0.5 * network.finish(stream).square().mean()\n"
    a, b = sides_of(plain(), plain(candidates=candidate(HARMLESS, half)))
    assert b.loss is not a.loss
    assert [block.mlp.forward.__name__ for block in b.model.blocks] == ["_forward"] * 2
    with pytest.raises(BenchError, match="2 candidates have a loss"):
        sides_of(plain(candidates=candidate(half, half + "# another\n")))


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_an_optimizer_must_make_the_same_update(
    candidate: Callable[..., tuple[Path, ...]], factor: float
) -> None:
    text = f"""
import types

def _step(muon, lr, momentum, decay_scale=1.0):
    type(muon).step(muon, {factor} * lr, momentum, decay_scale)

def apply(network, recipe):
    pass

def apply_optimizer(optimizer, recipe):
    optimizer.muon.step = types.MethodType(_step, optimizer.muon)
"""
    a, b = sides_of(plain(), plain(candidates=candidate(text)))
    if factor == 1.0:
        a()
        # Twice, because the momentum of A counts too.
        for _ in range(2):
            assert require_agreement(a, b)["errors"]["update"]["all"] == 0
    else:
        with pytest.raises(BenchError, match="B updates blocks"):
            require_agreement(a, b)


def test_progress_sets_loops_and_context() -> None:
    changes = ["levers.loop.first=0", "levers.loop.last=1", "levers.loop.start=0.5"]
    stages = ["model.context=128", "train.stages=['32@0.3', '128@1']"]
    shapes = []
    for at in (0.0, 0.7):
        [side] = sides_of(plain(*changes, *stages), at=at)
        told = side.describe(1.0)
        shapes.append((told["visits"], told["context"], told["tokens_per_second"]))
    assert shapes == [(2, 32.0, 512.0), (6, 128.0, 512.0)]


def test_the_exact_gradients_are_those_of_the_whole_batch() -> None:
    batch = batch_of([9, 30, 50, 4], 16)
    parts = list(cut(batch, 25))
    assert [len(part.inputs) for part in parts] == [41, 51, 5]
    for name in ("inputs", "targets"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    assert [part.segments.cu.tolist() for part in parts][1:] == [[0, 16, 32, 48, 51], [0, 5]]
    [side] = sides_of(plain())
    found = require_agreement(side, side)["errors"]["A"]
    assert found["all"] < 1e-5 and found["loss"] < 1e-6


def test_options_are_for_both_sides_or_for_one() -> None:
    options = {
        "overrides": ["a.b=1", "B=c.d=A=2"],
        "candidates": ["B=x/y.py", "B=z.py"],
        "attention": ["sdpa"],
    }
    a, b = read_variants(["one", "two"], options)
    assert a == Variant("one", ("a.b=1",), attention="sdpa")
    assert b == Variant("two", ("a.b=1", "c.d=A=2"), (Path("x/y.py"), Path("z.py")), "sdpa")
    assert a.label(b) == "one" and b.label(a) == "two + c.d=A=2 + y + z"
    with pytest.raises(BenchError, match="1 recipe named"):
        read_variants(["one"], {})


def test_unknown_modes_and_moments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(BenchError, match="no compile mode 'fastest'"):
        sides_of(plain(compiled="fastest"), compiled=True)
    with pytest.raises(BenchError, match=r"progress of training is 1\.5"):
        sides_of(plain(), at=1.5)
