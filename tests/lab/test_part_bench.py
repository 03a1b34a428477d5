"""Parts of two networks: each is right, wrong ones are refused."""

from pathlib import Path

import pytest
import torch

from underpar.compile import regions
from underpar.core.runtime import Runtime
from underpar.errors import BenchError
from underpar.lab import step_bench
from underpar.lab.bench import BenchResult
from underpar.lab.part_bench import OPERATORS, compare_parts
from underpar.lab.step_bench import Variant

TINY = ("model.dim=32", "model.mlp_dim=32", "model.vocab_size=64", "model.num_heads=2")
TINY += ("model.num_kv_heads=1", "train.micro_batch_tokens=128", "train.num_micro_batches=1")
TINY += ("score.batch_tokens=256",)
DOUBLED = """
import types

def _forward(mlp, x, visit):
    return 2 * type(mlp).forward(mlp, x, visit)

def apply(network, recipe):
    for block in network.blocks:
        block.mlp.forward = types.MethodType(_forward, block.mlp)
"""
DOUBLED_LOSS = """
from underpar.train.step import stream_loss

def loss(*parts):
    return 2 * stream_loss(*parts)

def apply(network, recipe):
    pass
"""


@pytest.fixture(autouse=True)
def _no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        step_bench, "sharing_in", lambda mode: regions.Sharing(lambda graph, examples: graph)
    )


def measure(name: str, *sides: Variant, compiled: bool = True) -> list[BenchResult]:
    runtime = Runtime(torch.device("cpu"), compiled=compiled)
    settings = {"quads": 4, "block_seconds": 1e-4, "warmup_seconds": 0.0}
    return compare_parts(name, sides, 0.0, runtime, **settings)


def plain(**fields: object) -> Variant:
    return Variant("pr2014+cpu", TINY, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*OPERATORS, "scoring"])
def test_a_part_is_right_and_timed(name: str) -> None:
    [result] = measure(name, plain(), plain())
    assert result.name == name and len(result.blocks) == 32
    assert all(block.seconds > 0 for block in result.blocks)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrong_part_is_refused(tmp_path: Path, compiled: bool) -> None:
    path = tmp_path / "doubled_part.py"
    path.write_text(DOUBLED)
    wrong = plain(candidates=(path,))
    with pytest.raises(BenchError, match="B is not the same function"):
        measure("mlp", plain(), wrong, compiled=compiled)
    with pytest.raises(BenchError, match="of nats"):
        measure("scoring", plain(), wrong)
    # It changes nothing of attention.
    assert measure("qkv", plain(), wrong, compiled=compiled)


def test_a_wrong_loss_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "doubled_loss.py"
    path.write_text(DOUBLED_LOSS)
    with pytest.raises(BenchError, match="B is not the same function as A: its error of output"):
        measure("loss", plain(), plain(candidates=(path,)))


def test_unknown_operators_and_missing_levers_are_refused() -> None:
    with pytest.raises(BenchError, match="'mlp'"):
        measure("mlq", plain(), plain())
    with pytest.raises(BenchError, match="nothing to the output of attention"):
        bare = Variant("baseline+cpu", TINY)
        measure("xsa", bare, bare)
