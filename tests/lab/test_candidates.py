"""Files with faster parts of a network: what is loaded, and what is refused."""

from pathlib import Path

import pytest
import torch

from lever_stacks import batch_of, randomized
from underpar.build.model import build_model
from underpar.compile.regions import Sharing
from underpar.compile.traced_run import TracedRun
from underpar.errors import BenchError
from underpar.lab.candidates import AS_IT_IS, load_candidate
from underpar.model.network import EAGER
from underpar.recipe import load_recipe
from underpar.train.step import mean_loss

DOUBLED = """
import types

def _forward(mlp, x, visit):
    return 2 * type(mlp).forward(mlp, x, visit)

def apply(network, recipe):
    assert recipe.model.num_layers == len(network.blocks)
    for block in network.blocks:
        block.mlp.forward = types.MethodType(_forward, block.mlp)

def loss(network, stream, targets, fused, weighers):
    return network.finish(stream).square().mean() + targets.sum() * 0
"""


def write(tmp_path: Path, text: str, name: str = "candidate.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_candidate_changes_one_network_and_no_other(tmp_path: Path) -> None:
    recipe = load_recipe("baseline+cpu", ["model.num_layers=2"])
    one, other = build_model(recipe), build_model(recipe)
    other.load_state_dict(one.state_dict())
    candidate = load_candidate(write(tmp_path, DOUBLED))
    AS_IT_IS.apply(one, recipe)
    candidate.apply(other, recipe)
    x = torch.randn(5, recipe.model.dim)
    for block in (*one.blocks, *other.blocks):
        torch.nn.init.normal_(block.mlp.down.weight)
    for a, b in zip(one.blocks, other.blocks, strict=True):
        b.mlp.load_state_dict(a.mlp.state_dict())
        torch.testing.assert_close(b.mlp(x, one.plan[0]), 2 * a.mlp(x, one.plan[0]))


def test_what_a_candidate_sets_is_compiled_with_the_network(tmp_path: Path) -> None:
    recipe = load_recipe("baseline+cpu", ["model.num_layers=2"])
    network = randomized(recipe)
    candidate, batch = load_candidate(write(tmp_path, DOUBLED)), batch_of([9, 30], 128)
    run = TracedRun(Sharing(lambda graph, examples: graph))
    before = mean_loss(network, batch, run).item()
    candidate.apply(network, recipe)
    for runner in (run, EAGER):
        loss = mean_loss(network, batch, runner, loss_of=candidate.loss).item()
        assert loss == pytest.approx(1.0, rel=1e-3) and before > 2
    changed = mean_loss(network, batch, run).item()
    assert changed == pytest.approx(mean_loss(network, batch).item(), rel=1e-5)
    assert abs(changed - before) > 1e-3


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    path = write(tmp_path, "calls = []\ndef apply(network, recipe):\n    calls.append(1)\n")
    assert load_candidate(path).apply is load_candidate(path).apply


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "has no function 'apply"),
        ("apply = 3\n", "apply is no function"),
        ("import no_such_package\n", "ModuleNotFoundError"),
        ("def apply(:\n", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_candidate_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        load_candidate(write(tmp_path, text))


def test_a_missing_file_and_another_kind_of_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="not a file"):
        load_candidate(tmp_path / "none.py")
    with pytest.raises(BenchError, match=r"end with \.py"):
        load_candidate(write(tmp_path, "", "notes.txt"))
