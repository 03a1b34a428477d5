"""train_gpt.py: it carries what a run needs and no more, and makes what the package makes."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_bundles import dump, pack

from commands import run_json
from tiny import TinyRun
from underpar.build.levers import resolve_levers
from underpar.core.run_folder import RunFolder
from underpar.data.folder import load_data
from underpar.errors import DataError, RecipeError, RunError
from underpar.recipe import Recipe, load_recipe, to_toml
from underpar.score.method import ADAPT, PLAIN
from underpar.stages import prove
from underpar.stages.pack import pack_run
from underpar.stages.train_gpt import open_data, parse, read_recipe, scoring_of
from underpar.submit.bundle import ENTRY, bundle, module_path, modules_of
from underpar.submit.folder import requirements
from underpar.submit.train_script import RECIPE_FILE, TRAIN_ENTRY, train_script, without_seed
from underpar.submit.unbundle import read_bundle

TWO_RANKS = [sys.executable, "-I", "-m", "torch.distributed.run", "--standalone"]
TWO_RANKS += ["--nproc-per-node=2", "--no-python"]


def test_it_carries_every_stage_of_a_run_and_no_more(tiny_recipe: Recipe) -> None:
    carried = modules_of(tiny_recipe, TRAIN_ENTRY, [ENTRY])
    stages = {f"underpar.stages.{name}" for name in ("train", "calibrate", "pack", "score")}
    assert stages | {ENTRY, "underpar.train.loop", "underpar.levers.ema"} <= carried
    parts = {name.split(".")[1] for name in carried if "." in name}
    assert not parts & {"cli", "lab", "report", "audit", "codec", "api"}
    assert "underpar.levers.xsa" not in carried
    listed = requirements(tiny_recipe, {"pytorch_version": "2.13.0+cpu"}).splitlines()
    assert "torch==2.13.0" in listed
    packages = {line.partition("==")[0] for line in listed}
    assert {"numpy", "safetensors", "sentencepiece"} <= packages
    assert not packages & {"rich", "typer", "click", "Jinja2", "pytest"}


def test_it_is_the_same_for_all_seeds_and_holds_the_recipe(tiny_recipe: Recipe) -> None:
    other = resolve_levers(load_recipe("baseline+cpu", ["train.seed=7"]))
    assert train_script(without_seed(other)) == train_script(other)
    sources = read_bundle(train_script(tiny_recipe)).sources
    assert sources[RECIPE_FILE] == to_toml(without_seed(tiny_recipe))


def test_the_recipe_is_read_with_seed_and_changes(tiny_recipe: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(tiny_recipe))
    recipe = read_recipe(path, 42, ["train.budget_steps=3"])
    assert (recipe.train.seed, recipe.train.budget_steps) == (42, 3)
    assert recipe.levers == tiny_recipe.levers
    with pytest.raises(RecipeError, match="unknown key"):
        read_recipe(path, 42, ["train.no_such_key=3"])


def test_the_score_follows_from_the_recipe(tiny_recipe: Recipe) -> None:
    # Adapters of the stream need one rank; those of each document do not.
    assert scoring_of(tiny_recipe) == scoring_of(load_recipe("demo")) == ADAPT
    # Windows alone are a way to score, too.
    assert scoring_of(load_recipe("baseline", ["score.stride=64"])) == ADAPT
    assert scoring_of(load_recipe("baseline")) == PLAIN


def test_options_come_from_words_or_from_the_variables_of_the_contest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DATA_PATH", "TOKENIZER_PATH", "SEED"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        parse([])
    assert "give --data FOLDER or set DATA_PATH" in capsys.readouterr().err
    monkeypatch.setenv("DATA_PATH", "tokens")
    monkeypatch.setenv("TOKENIZER_PATH", "bpe.model")
    monkeypatch.setenv("SEED", "42")
    options = parse([])
    assert (options.data, options.tokenizer, options.seed) == ("tokens", "bpe.model", 42)
    assert options.out == "run_seed42"
    assert parse(["--seed", "7", "--data", "mine"]).seed == 7


def test_published_token_files_are_imported_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    run_json("data", "export", tiny_run.data, "--out", tmp_path / "export")
    [tokens] = (tmp_path / "export" / "datasets").iterdir()
    [model] = (tmp_path / "export" / "tokenizers").iterdir()
    words = ["--data", str(tokens), "--out", str(tmp_path / "run"), "--seed", "1"]
    with pytest.raises(DataError, match="give --tokenizer FILE"):
        open_data(parse(words), tiny_run.recipe)
    options = parse([*words, "--tokenizer", str(model)])
    imported = open_data(options, tiny_run.recipe)
    # The published format has no documents' text: the training tokens are the same.
    shards = [load_data(folder).train for folder in (imported, tiny_run.data)]
    assert shards[0].tokens.tolist() == shards[1].tokens.tolist()
    before = (imported / "manifest.json").stat().st_mtime_ns
    assert open_data(options, tiny_run.recipe) == imported
    assert (imported / "manifest.json").stat().st_mtime_ns == before
    other = shutil.copytree(tokens, tmp_path / "other")
    options.data = str(other)
    with pytest.raises(RunError, match="was not imported from"):
        open_data(options, tiny_run.recipe)
    options.data = str(tiny_run.data)
    assert open_data(options, tiny_run.recipe) == tiny_run.data


def test_the_proof_notices_an_import_from_the_installed_package(tmp_path: Path) -> None:
    package = module_path("underpar").parents[1]
    (tmp_path / "train_gpt.py").write_text(f"import sys; sys.path.insert(0, {str(package)!r})\n")
    prove.run_script(tmp_path, [], [])
    with (tmp_path / "train_gpt.py").open("a") as file:
        file.write("import underpar\n")
    with pytest.raises(RunError, match="imported from the installed package"):
        prove.run_script(tmp_path, [], [])


def test_the_proof_does_not_run_the_code_of_strangers(tiny_recipe: Recipe, tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_bytes(b"import pathlib; pathlib.Path('ran').touch()\n")
    assert prove.prove_folder(tmp_path).verdict == "fail"
    ours = read_bundle(train_script(tiny_recipe)).sources
    sources = dict(ours) | {"underpar/errors.py": "print('hello')\n"}
    script.write_bytes(pack(dump(sources), TRAIN_ENTRY))
    found = prove.prove_folder(tmp_path)
    assert found.verdict == "not shown" and "underpar/errors.py" in found.summary
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train_gpt.py"]


def test_another_model_or_score_fails_the_proof(tiny_run: TinyRun, tmp_path: Path) -> None:
    ours = tiny_run.folder
    assert prove.compare(ours, ours, tiny_run.recipe).verdict == "pass"
    theirs = RunFolder(shutil.copytree(ours.path, tmp_path / "run"))
    theirs.artifact_file.write_bytes(theirs.artifact_file.read_bytes() + b"\0")
    found = prove.compare(theirs, ours, tiny_run.recipe)
    assert found.verdict == "fail" and "artifact" in found.summary
    shutil.copyfile(ours.artifact_file, theirs.artifact_file)
    shutil.copyfile(ours.score_file("plain"), theirs.score_file("adapt"))
    found = prove.compare(theirs, ours, tiny_run.recipe)
    assert found.verdict == "fail" and "score" in found.summary


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "pr2014", "h200-300s", "pr2135"])
def test_recipes_reproduce_from_one_file(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_bytes(train_script(resolve_levers(load_recipe(name))))
    found = prove.prove(script, seed=7)
    assert found.verdict == "pass", found.summary


@pytest.mark.slow
def test_two_ranks_make_what_the_package_makes_on_two_ranks(tmp_path: Path) -> None:
    """The demo's recipe: calibrated grids that fill the cap, adapters per document."""
    whole = resolve_levers(load_recipe("demo"))
    empty = tmp_path / "empty"
    empty.mkdir()
    script = empty / "train_gpt.py"
    script.write_bytes(train_script(whole))
    changes = prove.tiny_changes(num_steps=6)
    (tmp_path / "whole.toml").write_text(to_toml(whole))
    recipe = read_recipe(tmp_path / "whole.toml", 3, changes)
    data = prove.make_data(recipe, tmp_path)
    words = ["--data", str(data), "--out", "run", "--seed", "3"]
    prove.run_script(empty, words, changes, TWO_RANKS)

    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    folder = RunFolder(tmp_path / "package")

    def on_two_ranks(*command: object) -> None:
        program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from underpar.cli import main"
        package = str(module_path("underpar").parents[1])
        python = [sys.executable, "-I", "-c", f"{program}; main()", package]
        subprocess.run(
            [*TWO_RANKS, *python, *map(str, command), "--device", "cpu", "--json"],
            env=prove.ENVIRONMENT | {"HOME": str(tmp_path)},
            check=True,
            capture_output=True,
        )

    on_two_ranks("train", tmp_path / "recipe.toml", "--data", data, "--out", folder.path)
    pack_run(folder, script_bytes=script.stat().st_size)
    on_two_ranks("score", folder.artifact_file, "--data", data, "--adapt")
    theirs = RunFolder(empty / "run")
    assert theirs.read_json(theirs.about_file)["ranks"] == 2
    found = prove.compare(theirs, folder, recipe)
    assert found.verdict == "pass", found.summary
    # A bundle of a bundle: the counted script is the same too.
    assert theirs.script_file.read_bytes() == bundle(recipe)
    log = (theirs.path / "train_seed3.log").read_text()
    sha256 = hashlib.sha256(theirs.artifact_file.read_bytes()).hexdigest()
    assert f"artifact_sha256:{sha256}" in log and to_toml(recipe).strip() in log
