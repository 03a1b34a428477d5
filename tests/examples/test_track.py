"""The page that sends a run to trackers: each logged step arrives once, with the recipe."""

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tiny import TinyRun
from underpar.core.run_folder import RunFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "track.py"


@pytest.fixture
def track() -> ModuleType:
    spec = spec_from_file_location("track", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tracker:
    """The calls of a tracker, with the names that wandb and mlflow give them."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, float]]] = []
        self.settings: dict[str, Any] = {}
        self.is_closed = False

    def init(self, project: str, name: str, config: dict[str, Any]) -> "Tracker":
        self.settings = config
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.sent.append((step, figures))

    def finish(self) -> None:
        self.is_closed = True

    def as_mlflow(self) -> SimpleNamespace:
        return SimpleNamespace(
            set_experiment=lambda project: None,
            start_run=lambda run_name: None,
            log_params=self.settings.update,
            log_metrics=self.log,
            end_run=self.finish,
        )


@pytest.mark.parametrize("tool", ["trackio", "wandb", "mlflow"])
def test_every_step_arrives_once(
    tool: str, track: ModuleType, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker()
    fake = tracker.as_mlflow() if tool == "mlflow" else tracker
    monkeypatch.setitem(sys.modules, tool, fake)
    lines = list(tiny_run.folder.metrics())
    assert track.track(tiny_run.folder, tool, "tests", follow=True) == len(lines)
    assert [step for step, _ in tracker.sent] == [line["step"] for line in lines]
    assert tracker.sent[-1][1]["loss"] == lines[-1]["loss"]
    assert str(tracker.settings["train.seed"]) == str(tiny_run.recipe.train.seed)
    assert tracker.is_closed


def test_a_run_is_followed_until_it_has_its_weights(
    track: ModuleType, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tiny_run.folder.metrics_file.read_text().splitlines(keepends=True)
    run = RunFolder(tmp_path)

    def wait(_: float) -> None:
        written = run.metrics_file.read_text() if run.metrics_file.exists() else ""
        num_written = written.count("\n")
        run.metrics_file.write_text("".join(lines[: num_written + 2]))
        if num_written + 2 >= len(lines):
            run.weights_file.touch()

    monkeypatch.setattr(track.time, "sleep", wait)
    steps: Iterator[dict[str, Any]] = track.steps_of(run, follow=True)
    assert list(steps) == list(tiny_run.folder.metrics())
