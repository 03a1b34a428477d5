"""Every lever of scoring on the demo's model, by the command: all targets, finite, in order."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lever_stacks import ALL
from underpar import cli
from underpar.audit.order import wrong_events
from underpar.build.levers import plug_levers, resolve_levers
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.levers import lever_module
from underpar.recipe import Recipe, load_recipe
from underpar.score.ledger import score_from_dict
from underpar.stages.pack import pack_run
from underpar.stages.train import train

SCORING = [name for name in ALL if lever_module(name).STAGE == "infer"]
# What a lever goes with, and the fitted one, which an artifact must carry.
TOGETHER = {"phased_sgd": ("lora_ttt", "phased_sgd")}
CHANGES = ["train.budget_steps=20", "quant.constant=0.002", "levers.token_calibration=true"]
# Chunks of learning that so little text fills several times.
SMALL = ["score.adapt_tokens=512", "score.batch_tokens=2048"]


@dataclass(frozen=True)
class Demo:
    """A run of demo+cpu and its data."""

    recipe: Recipe
    data: Path
    folder: RunFolder

    def score(self, *words: object) -> dict[str, Any]:
        """What `underpar score` prints."""
        command = ["score", self.folder.artifact_file, "--data", self.data, "--device", "cpu"]
        result = CliRunner().invoke(cli.app, [*map(str, (*command, *words)), "--json"])
        assert result.exit_code == 0, result.output
        printed: dict[str, Any] = json.loads(result.stdout)
        return printed


@pytest.fixture(scope="module")
def demo(
    data_for: Callable[[Recipe], Path], tmp_path_factory: pytest.TempPathFactory, runtime: Runtime
) -> Demo:
    recipe = resolve_levers(load_recipe("demo+cpu", [*CHANGES, *SMALL]))
    data, folder = data_for(recipe), RunFolder(tmp_path_factory.mktemp("demo") / "run")
    assert train(recipe, data, folder, runtime)["finished"]
    pack_run(folder)
    return Demo(recipe, data, folder)


@pytest.fixture(scope="module")
def plain(demo: Demo) -> dict[str, Any]:
    return demo.score()


def is_whole(demo: Demo, printed: dict[str, Any], plain: dict[str, Any]) -> bool:
    """All targets have a price, in an order that a decoder has."""
    score = score_from_dict(json.loads(Path(printed["file"]).read_text()))
    totals = [entry.num_targets for entry in score.entries]
    assert printed["targets"] == plain["targets"] == sum(totals)
    assert all(math.isfinite(entry.bits) and entry.bits > 0 for entry in score.entries)
    return wrong_events(score, totals) == 0


@pytest.mark.parametrize("name", SCORING)
def test_a_lever_scores_the_demo(name: str, demo: Demo, plain: dict[str, Any]) -> None:
    levers = [word for n in TOGETHER.get(name, (name,)) for word in ("--with", n)]
    printed = demo.score(*levers)
    assert is_whole(demo, printed, plain)
    assert printed["bits"] != plain["bits"]


ADAPTERS = ("adapt_scales", "adapt_bias", "ttt_e2e", "stream_sgd")


@pytest.fixture(scope="module", params=[("--stride", 32), ("--stride", 32, "--flat")], ids=len)
def windows(request: pytest.FixtureRequest) -> tuple[object, ...]:
    chosen: tuple[object, ...] = request.param
    return chosen


@pytest.fixture(scope="module")
def still(demo: Demo, windows: tuple[object, ...]) -> dict[str, Any]:
    """A score of windows without any adapter."""
    return demo.score(*windows)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_learns_chunks_of_windows(
    name: str,
    windows: tuple[object, ...],
    demo: Demo,
    plain: dict[str, Any],
    still: dict[str, Any],
) -> None:
    assert set(ADAPTERS) == {
        name
        for name in SCORING
        if hasattr(
            plug_levers(load_recipe("demo", [f"levers.{name}=true"]), "infer")[name], "foresee"
        )
    }
    printed = demo.score("--with", name, *windows)
    assert is_whole(demo, printed, plain) and is_whole(demo, still, plain)
    assert printed["bits"] != still["bits"]


def test_the_recipe_says_how(demo: Demo, plain: dict[str, Any]) -> None:
    printed = demo.score("--adapt")
    assert printed["method"] == "adapt" and is_whole(demo, printed, plain)
    by_hand = demo.score("--with", "lora_ttt", "--with", "token_calibration")
    assert by_hand["bits"] == printed["bits"]
    sorted_ = demo.score("--adapt", "--order", "published")
    assert (sorted_["method"], sorted_["order"]) == (
        "lora_ttt+token_calibration+published",
        "published",
    )
