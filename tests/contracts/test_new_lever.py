"""Adding a lever is one file and one line of the table: every contract then holds it to account."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import test_levers as contract
import torch

from lever_stacks import stack_with
from underpar.build.levers import plug_levers
from underpar.build.model import build_model
from underpar.core.runtime import Runtime
from underpar.errors import LeverError
from underpar.lab.lever_cards import read_card
from underpar.levers import LEVERS, lever_module
from underpar.recipe import Recipe, load_recipe
from underpar.submit.bundle import bundle

NAME = "channel_bias"

FILE = '''"""A learned offset on every channel of the stream's start.

It shows how a lever is added. Source: this test, in the manner of PR 1219's stem. Legal: the same
vector for every token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpar.recipe import ModelSpec
from underpar.seams import KVCache

STAGE = "model"


@dataclass(frozen=True)
class Settings:
    """`init` of every channel."""

    init: float = 0.0


class Lever(nn.Module):
    """x + bias."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((spec.dim,), settings.init))

    def neutral_(self) -> None:
        """Add nothing."""
        nn.init.zeros_(self.bias)

    def stem(self, x: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Shift x (N, dim)."""
        return x + self.bias.to(x.dtype)
'''

AVERAGE = '''"""Keeps the latest weights."""

from dataclasses import dataclass

STAGE = "train"


@dataclass(frozen=True)
class Settings:
    """None."""


class Lever:
    def __init__(self, settings: Settings, spec: object) -> None: ...

    def start(self, weights: dict) -> None: ...

    def update(self, weights: dict, step: int) -> None: ...

    def average(self) -> dict: ...

    def state(self) -> dict: ...

    def load(self, state: dict) -> None: ...
'''


@pytest.fixture(autouse=True)
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, and the line."""
    (tmp_path / f"{NAME}.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(LEVERS, NAME, NAME)


def test_it_keeps_every_contract_of_a_model_lever() -> None:
    contract.test_model_levers_are_causal_and_keep_documents_apart(NAME)
    contract.test_a_lever_changes_the_network(NAME)
    contract.test_the_neutral_state_is_the_model_without_the_lever(NAME)
    contract.test_every_parameter_is_grouped_quantized_and_packed(NAME)
    contract.test_gradient_reaches_every_element_that_is_not_dead_by_layout(NAME)
    contract.test_stepping_equals_pricing_with_the_lever(NAME)
    contract.test_the_stream_stays_half_precision_under_autocast(NAME)
    contract.test_a_lever_says_what_it_is(lever_module(NAME))
    contract.compare_compiled((NAME,))


def test_it_trains_packs_and_scores(
    data_for: Callable[[Recipe], Path], tmp_path: Path, runtime: Runtime
) -> None:
    contract.train_pack_score((NAME,), data_for, tmp_path, runtime)


def test_recipes_bundles_and_docs_know_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "pr2014"\n[levers.{NAME}]\ninit = 0.5\n')
    model = build_model(load_recipe(f"{path}+cpu"))
    assert torch.equal(model.get_parameter(f"levers.{NAME}.bias"), torch.full((96,), 0.5))
    assert len(bundle(stack_with(NAME))) > len(bundle(load_recipe("cpu")))
    card = read_card(NAME)
    assert card.num_parameters == 512
    assert card.source == "this test, in the manner of PR 1219's stem."


def test_a_lever_with_neither_a_class_nor_a_function_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shapeless.py").write_text(FILE.replace("class Lever(", "class Bias("))
    monkeypatch.setitem(LEVERS, "shapeless", "shapeless")
    with pytest.raises(LeverError, match="neither a class Lever"):
        build_model(stack_with("shapeless"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def average(", "def averages(", "no seam of the stage 'train'; define one of average"),
        ("def state(", "def states(", "the seam 'average' needs a method 'state' too"),
        (
            "weights: dict, step: int",
            "weights: dict",
            r"update\(weights: dict\).*calls update\(weights, step",
        ),
    ],
)
def test_a_lever_of_another_stage_must_fit_its_seam(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old in AVERAGE
    (tmp_path / "unfit.py").write_text(AVERAGE.replace(old, new))
    monkeypatch.setitem(LEVERS, "unfit", "unfit")
    with pytest.raises(LeverError, match=message):
        plug_levers(stack_with("unfit"), "train")
    sys.modules.pop("unfit")


def test_a_lever_that_looks_ahead_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FILE.replace("x + self.bias.to(x.dtype)", "x + self.bias.to(x.dtype) * x.roll(-1, 0)")
    (tmp_path / "leaky_bias.py").write_text(text)
    monkeypatch.setitem(LEVERS, "leaky_bias", "leaky_bias")
    with pytest.raises(AssertionError):
        contract.test_model_levers_are_causal_and_keep_documents_apart("leaky_bias")


def test_a_lever_without_a_gradient_path_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in the public asymmetric soft cap: a parameter that nothing trains.
    text = FILE.replace("self.bias.to(x.dtype)", "self.bias.detach().to(x.dtype)")
    (tmp_path / "still_bias.py").write_text(text)
    monkeypatch.setitem(LEVERS, "still_bias", "still_bias")
    with pytest.raises(AssertionError):
        contract.test_gradient_reaches_every_element_that_is_not_dead_by_layout("still_bias")
