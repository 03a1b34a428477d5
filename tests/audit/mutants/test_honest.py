"""No honest run is accused: other methods, places, caps, tokenizers, data and recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from forge import CPU, Forge, copy_of

from small_data import write_published
from tiny import TinyRun
from underpar.audit.finding import FAIL, NOT_SHOWN, PASS
from underpar.audit.rules import run_audit
from underpar.build.levers import plug_levers, resolve_levers
from underpar.core.run_folder import RunFolder
from underpar.data.folder import load_data
from underpar.data.published.exchange import ImportOptions, import_published
from underpar.recipe import Recipe, list_recipes, load_recipe
from underpar.score.method import ADAPT, PLAIN, PUBLISHED, Method
from underpar.stages.audit import AuditRequest, audit_run, open_case
from underpar.stages.calibrate import calibrate
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact
from underpar.stages.train import begin_run, make_trainer, train

# Rules that read files; the others run the model on text of their own.
OF_FILES = ["size", "time", "identity", "splits", "memorization", "score files", "coverage"]
OF_FILES += ["bytes", "reproduction", "scoring time"]


@pytest.fixture
def forge(tiny_run: TinyRun, tmp_path: Path) -> Forge:
    return copy_of(tiny_run.folder, tiny_run.data, tmp_path)


def verdicts(run: RunFolder, data: Path | None = None) -> dict[str, str]:
    """The verdict of each rule that reads files."""
    case = open_case(run, CPU, AuditRequest(data, code_tokens=300))
    return {f.rule: f.verdict for f in run_audit(case, rules=OF_FILES)}


def all_pass(run: RunFolder, data: Path | None = None) -> bool:
    found = verdicts(run, data)
    assert found == dict.fromkeys(OF_FILES, PASS)
    return True


LORA_CHANGES = ["levers.lora_ttt={rank=4, lanes=2, group=2, lr=0.01}"]
METHODS = [
    (Method(("tilt",), stride=64, flat=True), []),
    (replace(ADAPT, seconds=1e-6), []),
]
SLOW_METHODS = [
    (Method(stride=64), []),
    (Method(("tilt",), stride=64), []),
    (Method(("lora_ttt", "tilt")), LORA_CHANGES),
    (Method(("lora_ttt",), order=PUBLISHED), LORA_CHANGES),
    (Method(("lora_ttt",), seconds=1e-6), LORA_CHANGES),
    (Method(("stream_sgd",), stride=64, flat=True), ["levers.stream_sgd={lr=0.01, cosine=true}"]),
]


@pytest.mark.parametrize(
    ("method", "changes"),
    [*METHODS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_METHODS)],
    ids=lambda value: getattr(value, "label", ""),
)
def test_every_method_of_scoring(forge: Forge, method: Method, changes: list[str]) -> None:
    score_artifact(forge.run.artifact_file, forge.data, CPU, method, changes)
    assert all_pass(forge.run)


def test_moved_folders(forge: Forge, tmp_path: Path) -> None:
    run = RunFolder(forge.run.path.rename(tmp_path / "elsewhere"))
    data = forge.data.rename(tmp_path / "texts")
    assert all_pass(run, data)


def test_packed_again(forge: Forge) -> None:
    size = forge.run.artifact_file.stat().st_size
    forge.score(Method(("tilt",)))
    # The same artifact: its scores stay, and the script still has their levers.
    pack_run(forge.run)
    assert all_pass(forge.run)
    for path in forge.run.score_files():
        path.unlink()
    pack_run(forge.run, cap_bytes=1_000_000, tokenizer_inside=False)
    assert forge.run.artifact_file.stat().st_size < size
    forge.score()
    assert all_pass(forge.run)


@pytest.mark.slow
def test_a_resumed_run(tiny_run: TinyRun, tmp_path: Path) -> None:
    run, data = RunFolder(tmp_path / "run"), load_data(tiny_run.data)
    begin_run(run, tiny_run.recipe, tiny_run.data, data, CPU)
    run.path.mkdir(exist_ok=True)
    trainer = make_trainer(tiny_run.recipe, data, run, CPU)
    assert not trainer.run(lambda line: line["step"] == 12)
    assert train(tiny_run.recipe, tiny_run.data, run, CPU)["finished"]
    pack_run(run)
    score_artifact(run.artifact_file, tiny_run.data, CPU, PLAIN)
    assert all_pass(run)


def test_a_calibrated_run_needs_the_clock_of_its_calibration(forge: Forge) -> None:
    rules = (
        "embedding.weight int6:12",
        "blocks.*.weight grid8",
        "levers.*.weight int6:12",
        "* fp16",
    )
    part = replace(forge.run.read_recipe().quant, rules=rules, constant=2.0)
    calibrate(forge.run, forge.data, CPU)
    for path in forge.run.score_files():
        path.unlink()
    pack_run(forge.run, part=part)
    forge.score()
    assert all_pass(forge.run)
    forge.run.calibration_file.unlink()
    assert verdicts(forge.run)["time"] == NOT_SHOWN


@pytest.mark.slow
def test_imported_data_are_not_shown_unless_they_are_expected(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    source, data = tmp_path / "published", tmp_path / "data"
    built = load_data(tiny_run.data)
    for split, shard in (("train", built.train), ("val", built.val)):
        write_published(source / f"fineweb_{split}_000000.bin", shard.tokens.tolist())
    import_published(source, data, ImportOptions(tiny_run.data / "tokenizer.model"))
    run = RunFolder(tmp_path / "run")
    assert train(tiny_run.recipe, data, run, CPU)["finished"]
    pack_run(run)
    score_artifact(run.artifact_file, data, CPU, PLAIN)
    assert verdicts(run) == dict.fromkeys(OF_FILES, PASS) | {
        "bytes": NOT_SHOWN,
        "splits": NOT_SHOWN,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in list_recipes() if name != "cpu"])
def test_every_shipped_recipe(
    name: str, data_for: Callable[[Recipe], Path], tmp_path: Path
) -> None:
    recipe = resolve_levers(load_recipe(f"{name}+cpu"))
    data, run = data_for(recipe), RunFolder(tmp_path / "run")
    assert train(recipe, data, run, CPU)["finished"]
    pack_run(run)
    score_artifact(run.artifact_file, data, CPU, PLAIN)
    if plug_levers(recipe, "infer"):
        score_artifact(run.artifact_file, data, CPU, ADAPT)
    audited = audit_run(run, CPU, AuditRequest(code_tokens=1000))
    wrong = [(f.rule, f.summary) for f in audited.findings if f.verdict == FAIL]
    assert wrong == []
