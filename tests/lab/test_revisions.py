"""Git revisions as sides of `bench step`: exported, run in processes, compared, refused."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import Result

import underpar
from commands import invoke
from underpar.errors import BenchError
from underpar.lab.revisions import commit_of, export, open_revisions
from underpar.lab.step_bench import Variant, require_agreement

TINY = ("model.num_layers=1", "model.dim=16", "model.mlp_dim=32", "model.vocab_size=64")
TINY += ("model.num_heads=2", "model.num_kv_heads=1")
TINY += ("train.micro_batch_tokens=128", "train.num_micro_batches=1")
SOURCE = Path(underpar.__file__).parent


def git(*words: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *words], check=True, capture_output=True)


def commit_all(tag: str) -> None:
    git("add", ".")
    git("commit", "-m", tag, "--allow-empty")
    git("tag", tag)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the package at its tag "one"; it is the current folder."""
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    keep = shutil.ignore_patterns("__pycache__", "demo")
    shutil.copytree(SOURCE, tmp_path / "src/underpar", ignore=keep)
    commit_all("one")
    return tmp_path / "src/underpar"


def edit(path: Path, old: str, new: str, tag: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    commit_all(tag)


def bench(*words: str) -> Result:
    sets = [word for change in TINY for word in ("--set", change)]
    timing = ["--quads", "4", "--block-seconds", "0.001", "--warmup-seconds", "0"]
    recipes = ["baseline+cpu", "baseline+cpu"]
    return invoke("bench", "step", *recipes, *sets, *timing, "--device", "cpu", *words)


def sides_of(*revisions: str) -> list[Variant]:
    return [Variant("baseline+cpu", TINY, revision=revision) for revision in revisions]


def test_two_revisions_are_timed_in_processes_of_their_own(repository: Path) -> None:
    # What only the source of the second revision can say.
    edit(repository / "lab/step_bench.py", '"visits": len', '"two": 2, "visits": len', "two")
    result = bench("--revision", "A=one", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["processes"] == 3 and found["check"]["same_function"]
    assert found["check"]["errors"]["update"]["all"] == 0
    assert found["label_a"] == "baseline+cpu + revision one"
    sides = found["sides"]
    assert [sides[x]["revision"] for x in "AB"] == [commit_of("one"), commit_of("two")]
    assert [sides[x].get("two") for x in "AB"] == [None, 2]
    # Both read the source of their revision, and the tree may differ from it then.
    (repository / "lab/step_bench.py").write_text("broken")
    with pytest.raises(BenchError, match=r"src/underpar/lab/step_bench\.py differs from HEAD"):
        bench("--revision", "A=one")


@pytest.mark.slow
def test_a_revision_that_computes_something_else_is_not_timed(repository: Path) -> None:
    step = (repository / "train/step.py").read_text()
    edit(repository / "train/step.py", "  loss.backward()", "  (1.01 * loss).backward()", "slope")
    (repository / "train/step.py").write_text(step)
    edit(repository / "train/muon.py", "alpha=-lr * scale", "alpha=-1.01 * lr * scale", "rate")
    with open_revisions(sides_of("one", "slope", "rate"), 0.0, "cpu") as ([a, slope, rate], twin):
        assert require_agreement(a, twin)["errors"]["B"]["all"] < 1e-6
        with pytest.raises(BenchError, match="B is wrong"):
            require_agreement(a, slope)
        with pytest.raises(BenchError, match="C updates blocks"):
            require_agreement(a, rate, "C")


def open_all(*variants: Variant, at: float = 0.0) -> None:
    with open_revisions(variants, at, "cpu"):
        pass


@pytest.mark.slow
def test_a_process_that_cannot_run_is_an_error_of_its_revision(repository: Path) -> None:
    edit(repository / "lab/step_bench.py", "import math\n", "import math\nbroken\n", "two")
    with pytest.raises(BenchError, match=r"A, revision \w+: its process ended with code 1; NameE"):
        open_all(*sides_of("two", "one"))
    with pytest.raises(BenchError, match=r"A, revision \w+: no recipe 'nowhere'"):
        open_all(Variant("nowhere", revision="one"))


def test_what_is_no_revision_is_refused_in_one_line(repository: Path) -> None:
    for wrong in ("nowhere", "-h", "one:src"):
        with pytest.raises(BenchError, match=f"no git revision {wrong!r}"):
            bench("--revision", f"B={wrong}")
    (repository / "lab/step_bench.py").unlink()
    commit_all("early")
    with pytest.raises(BenchError, match=r"has no src/underpar/lab/step_bench\.py"):
        export(commit_of("early"), repository)
    with pytest.raises(BenchError, match="progress of training is 2"):
        open_all(*sides_of("one", "one"), at=2.0)


def test_a_folder_without_git_and_a_machine_without_it_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BenchError, match="needs a git repository in this folder"):
        bench("--revision", "A=one", "--revision", "B=one")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="git, which is not installed"):
        bench("--revision", "A=one")


def test_only_steps_take_a_revision() -> None:
    with pytest.raises(BenchError, match="takes no revision"):
        invoke("bench", "scoring", "demo", "demo", "--revision", "A=one")
