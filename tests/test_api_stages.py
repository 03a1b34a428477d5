"""The stages as Python functions: they do what the commands do, and say so in types."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import underpar
from tiny import TinyRun
from underpar.api import Model, TrainedRun
from underpar.artifact.budget import Budget
from underpar.audit.finding import Finding
from underpar.core.progress import SILENT, Lines
from underpar.core.run_folder import RunFolder
from underpar.data.folder import data_identity, load_data
from underpar.errors import RecipeError, RuleError, RunError
from underpar.stages.audit import Audited
from underpar.stages.score import Scored

# `tiny_recipe` of conftest.py, as a user writes it.
TINY = {
    "model.num_layers": 2,
    "levers.qk_gain": True,
    "levers.smear.init": 0.3,
    "levers.bigram.buckets": 500,
    "levers.ema": True,
    "levers.softcap": True,
    "levers.adapt_scales": True,
}


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    out = tmp_path_factory.mktemp("api") / "run"
    return underpar.train("baseline+cpu", tiny_data, out, set=TINY, device="cpu", progress=SILENT)


def test_training_is_that_of_the_stage(run: TrainedRun, tiny_run: TinyRun) -> None:
    assert run.finished and run.stopped is None
    ours, theirs = RunFolder(run.path), tiny_run.folder
    assert ours.recipe_file.read_bytes() == theirs.recipe_file.read_bytes()
    validation = theirs.read_json(theirs.validation_file)
    assert (run.live_bpb, run.average_bpb) == (validation["live_bpb"], validation["average_bpb"])
    assert run.step == tiny_run.recipe.train.budget_steps
    assert f"{run.step} steps" in repr(run) and f"{run.average_bpb:.4f} bits" in repr(run)
    losses = [line["loss"] for line in run.metrics("step", "loss")]
    assert losses == [line["loss"] for line in theirs.metrics("loss")]


def test_a_run_is_packed_scored_audited_and_reported(run: TrainedRun, tiny_run: TinyRun) -> None:
    budget = underpar.pack(run, device="cpu", progress=SILENT)
    assert isinstance(budget, Budget) and "bytes" in repr(budget) and len(repr(budget)) < 100
    assert RunFolder(run.path).artifact_file.read_bytes() == (
        tiny_run.folder.artifact_file.read_bytes()
    )
    for adapt in (False, True):
        scored = underpar.score(run, tiny_run.data, adapt=adapt, device="cpu", progress=SILENT)
        assert isinstance(scored, Scored) and scored.path.is_file()
        name = "adapt" if adapt else "plain"
        theirs = tiny_run.folder.read_json(tiny_run.folder.score_file(name))
        assert scored.bpb == theirs["bpb"]
        assert f"{scored.bpb:.4f}" in repr(scored) and len(repr(scored)) < 150
    held_out = load_data(tiny_run.data).val.num_documents
    assert len(scored.score.entries) == held_out
    assert underpar.load(run).recipe.hash == tiny_run.recipe.hash
    sample = {"documents": 2, "code_tokens": 200, "retrain": 1, "seed": 1}
    audited = underpar.audit(run, device="cpu", progress=SILENT, **sample)
    assert isinstance(audited, Audited)
    assert repr(audited).startswith(f"Audited({audited.verdict}: ")
    page = underpar.report(run)
    assert page.parent == run.path and "<html" in page.read_text()
    assert underpar.report(run, out=run.path / "other.html").name == "other.html"


def test_data_are_those_of_the_stage(corpus_file: Path, tiny_data: Path, tmp_path: Path) -> None:
    for texts in (corpus_file, [corpus_file]):
        data = underpar.build_data(
            texts, tmp_path / "data", "baseline+cpu", overwrite=True, progress=SILENT
        )
        assert data_identity(data) == data_identity(load_data(tiny_data))
    assert f"{data.val.num_bytes:,} held out" in repr(data) and len(repr(data)) < 100


def test_values_are_changed_by_name(tiny_run: TinyRun, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="num_layer"):
        underpar.train("baseline+cpu", tiny_run.data, tmp_path / "a", set={"model.num_layer": 2})
    missing = tmp_path / "mine.toml"
    with pytest.raises(RecipeError, match=r"mine\.toml' does not exist"):
        underpar.train(missing, tiny_run.data, tmp_path / "a", set={"data.tokenizer": missing})
    with pytest.raises(RecipeError, match=r"only quant\.\* can change"):
        underpar.pack(tiny_run.folder.path, set={"model.num_layers": 2})
    with pytest.raises(RuleError, match="leave out --with"):
        underpar.score(tiny_run.folder.path, tiny_run.data, adapt=True, levers=["match"])
    with pytest.raises(RunError, match="no run to report on"):
        underpar.report()
    assert not (tmp_path / "a").exists()


def test_functions_keep_their_names_beside_packages() -> None:
    # A process of its own: here the packages are imported already.
    program = """
import sys, underpar
assert "torch" not in sys.modules and set(underpar.__all__) <= set(dir(underpar))
import underpar.train.guard, underpar.score.method
from underpar.report.build import build_report
for name in underpar.__all__:
    assert callable(getattr(underpar, name)), name
from underpar.train import guard
from underpar import train
assert callable(train) and guard.__name__ == "underpar.train.guard"
try:
    underpar.fly
except AttributeError as error:
    assert "fly" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_guide_names_what_there_is() -> None:
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
    about_model, _, about_stages = page.partition("## Make one")
    calls = re.findall(r"^\| `model\.(\w+).*` \|", about_model, re.MULTILINE)
    assert len(calls) == 6 and names_of(Model) >= {*calls}
    rows = re.findall(r"^\| `(\w+)\(.*\)` \| `(\w+)` \| (.*) \|$", about_stages, re.MULTILINE)
    assert {name for name, _, _ in rows} == {*underpar.__all__} - {"Model", "load"}
    # What a result holds, besides what it has itself.
    inside = {Audited: names_of(Finding), Scored: {"entries"}}
    for name, kind, has in rows:
        result = get_type_hints(getattr(underpar, name))["return"]
        assert result.__name__ == kind
        named = {*re.findall(r"`(\w+)", has)}
        assert names_of(result) | inside.get(result, set()) >= named, kind


def names_of(kind: type) -> set[str]:
    """The attributes of a class and of its dataclass fields."""
    return {*dir(kind), *getattr(kind, "__dataclass_fields__", {})}


def test_lines_are_printed_after_some_time(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines(0.0).task("train", 4) as task:
        task.update(1, "step 7")
    with Lines(1e9).task("score", 4) as task:
        task.update(4, "too soon")
    Lines().note("a note")
    assert capsys.readouterr().out == "train     25%  step 7\na note\n"
