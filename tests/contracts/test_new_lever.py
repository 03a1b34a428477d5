"""What docs/lever-walkthrough.md shows is true: the lever in use, and one that keeps all contracts.

Adding a lever is one file and one line of the table; the contracts then run on it.
"""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import test_levers as contract
import torch

from lever_stacks import stack_with
from underpar import levers
from underpar.build.levers import plug_levers
from underpar.build.model import build_model
from underpar.core.runtime import Runtime
from underpar.errors import LeverError
from underpar.lab.lever_cards import read_card
from underpar.levers import LEVERS, lever_module
from underpar.recipe import Recipe, load_recipe
from underpar.submit.bundle import bundle

PAGE = (Path(__file__).parents[2] / "docs" / "lever-walkthrough.md").read_text()
# The file of smear with comments, the file of a new lever, and its line of the table.
COMMENTED, FILE, LINE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[(NAME, MODULE)] = ast.literal_eval("{" + LINE.strip() + "}").items()


# The lever that the README shows.
README = (Path(__file__).parents[2] / "README.md").read_text()
README_FILE = re.findall(r"```py\n(.*?)```", README, re.DOTALL)[0]


AVERAGE = '''"""Keeps the latest weights."""

from dataclasses import dataclass

STAGE = "train"


@dataclass(frozen=True)
class Settings:
    """None."""


class Lever:
    def __init__(self, settings: Settings, spec: object) -> None: ...

    def start(self, weights: dict) -> None: ...

    def update(self, weights: dict, step: int, lr_scale: float) -> None: ...

    def average(self) -> dict: ...

    def state(self) -> dict: ...

    def load(self, state: dict) -> None: ...
'''


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds a file beside the levers, and its line to the table."""
    monkeypatch.setattr(levers, "__path__", [*levers.__path__, str(tmp_path)])

    def add_lever(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setitem(LEVERS, name, f"underpar.levers.{name}")

    return add_lever


@pytest.fixture(autouse=True)
def added(add: Callable[..., None]) -> None:
    add(NAME, FILE)
    assert LEVERS[NAME] == MODULE


def test_the_commented_lever_is_the_one_in_use() -> None:
    source = Path(lever_module("smear").__file__ or "").read_text()
    assert ast.dump(ast.parse(COMMENTED)) == ast.dump(ast.parse(source))
    without = [line for line in COMMENTED.splitlines() if not line.strip().startswith("#")]
    assert without == source.splitlines()


def test_the_page_names_tests_and_functions_that_exist() -> None:
    tests = Path(contract.__file__).read_text()
    named = re.findall(r"^\| `(test_\w+)` \|", PAGE, re.MULTILINE)
    assert len(named) == 10
    for test in named:
        assert f"def {test}(" in tests
    for path in re.findall(r"`(?:src/underpar/)?((?:\w+/)+\w+\.py)`", PAGE):
        root = Path(levers.__file__).parents[1]
        assert (root / path).exists() or (root.parents[1] / path).exists() or NAME in path, path


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
    assert card.source == "this page, in the manner of PR 1219's stem."


def test_the_lever_of_the_readme_keeps_the_contracts_of_its_seam(add: Callable[..., None]) -> None:
    add("branch_bias", README_FILE)
    contract.test_model_levers_are_causal_and_keep_documents_apart("branch_bias")
    contract.test_the_neutral_state_is_the_model_without_the_lever("branch_bias")
    contract.test_every_parameter_is_grouped_quantized_and_packed("branch_bias")


def test_a_lever_with_neither_a_class_nor_a_function_is_refused(add: Callable[..., None]) -> None:
    add("shapeless", FILE.replace("class Lever(", "class Bias("))
    with pytest.raises(LeverError, match="neither a class Lever"):
        build_model(stack_with("shapeless"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def average(", "def averages(", "no seam of the stage 'train'; define one of average"),
        ("def state(", "def states(", "the seam 'average' needs a method 'state' too"),
        (
            "weights: dict, step: int, lr_scale: float",
            "weights: dict",
            r"update\(weights: dict\).*calls update\(weights, step",
        ),
    ],
)
def test_a_lever_of_another_stage_must_fit_its_seam(
    old: str, new: str, message: str, add: Callable[..., None]
) -> None:
    assert old in AVERAGE
    add("unfit", AVERAGE.replace(old, new))
    with pytest.raises(LeverError, match=message):
        plug_levers(stack_with("unfit"), "train")
    sys.modules.pop("underpar.levers.unfit")


def test_a_lever_that_looks_ahead_is_caught(add: Callable[..., None]) -> None:
    honest = "x + self.bias.to(x.dtype)"
    add("leaky_bias", FILE.replace(honest, f"{honest} * x.roll(-1, 0)"))
    with pytest.raises(AssertionError):
        contract.test_model_levers_are_causal_and_keep_documents_apart("leaky_bias")


def test_a_lever_without_a_gradient_path_is_caught(add: Callable[..., None]) -> None:
    # As in the public asymmetric soft cap: a parameter that nothing trains.
    add("still_bias", FILE.replace("self.bias.to(x.dtype)", "self.bias.detach().to(x.dtype)"))
    with pytest.raises(AssertionError):
        contract.test_gradient_reaches_every_element_that_is_not_dead_by_layout("still_bias")
