"""A submission folder: written from runs that agree, checked, proved; other runs are refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from submittable import change_json, copy_run, make_submittable, write_audit

import underpar.stages.submit
from commands import invoke, run_json
from tiny import TinyRun
from underpar.audit.finding import Finding
from underpar.audit.submission import check_submission
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_about, read_tensors, save_tensors
from underpar.errors import UnderparError
from underpar.stages.foreign import audit_submission
from underpar.stages.pack import pack_run
from underpar.stages.submit import Author, write_submission
from underpar.submit.train_script import train_script

CAP = 16_000_000
ME = Author("A Name", "a-name", "A title", "One sentence")
# Keys of submission.json. Those of the first three lines are the contest's.
KEYS = {"author", "github_id", "name", "blurb", "date", "track", "val_loss", "val_bpb"}
KEYS |= {"val_loss_std", "val_bpb_std", "seeds", "seed_results", "bytes_total", "bytes_code"}
KEYS |= {"hardware", "pytorch_version"}
KEYS |= {"bytes_model", "code_counted", "code_sha256", "score_method", "data_identity"}
KEYS |= {"recipe", "tool"}
SEED_KEYS = {"val_loss", "val_bpb", "pre_quant_val_bpb", "artifact_bytes", "bytes_model"}
SEED_KEYS |= {"artifact_sha256", "steps", "train_seconds", "eval_seconds", "audit"}
WORDS = ("--author", ME.author, "--github-id", ME.github_id)


@pytest.fixture(scope="module")
def source(
    tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory, runtime: Runtime
) -> RunFolder:
    """One run; shared, so tests copy it."""
    return make_submittable(tiny_run, tmp_path_factory.mktemp("submit") / "run", runtime)


@pytest.fixture(scope="module")
def seeds(source: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The run and copies of it with other seeds, one of which scored otherwise."""
    folder = tmp_path_factory.mktemp("seeds")
    runs = [source, *(copy_run(source, folder / f"run{seed}", seed) for seed in (1, 42))]
    tree = runs[1].read_json(runs[1].score_file("adapt"))
    tree["ledger"][0]["bits"] += 64.0
    bits = [entry["bits"] for entry in tree["ledger"]]
    tree["bits"] = float(np.sum(bits, dtype=np.float64)) + tree["side_bits"]
    tree["bpb"] = tree["bits"] / tree["bytes"]
    runs[1].score_file("adapt").write_text(json.dumps(tree))
    write_audit(runs[1])
    return [run.path for run in runs]


@pytest.fixture(scope="module")
def written(seeds: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A submission folder of three seeds; shared, so tests copy it."""
    out = tmp_path_factory.mktemp("out") / "record"
    write_submission(seeds, out, ME)
    return out


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.rule: finding.verdict for finding in findings}


def test_the_command_writes_checks_and_proves(seeds: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "record"
    result = run_json("submit", *seeds, "--out", out, *WORDS)
    assert {f["rule"]: f["verdict"] for f in result["findings"]} == dict.fromkeys(
        ["files", "submission.json", "script", "size", "runs", "reproduction"], "pass"
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "requirements.txt",
        "submission.json",
        "train_gpt.py",
        "train_seed1.log",
        "train_seed1337.log",
        "train_seed42.log",
    ]
    assert result.keys() == {"folder", "verdict", "findings"}
    without = invoke("submit", "--verify", out, "--no-proof", "--json")
    assert (without.exit_code, json.loads(without.stdout)["verdict"]) == (3, "not shown")
    assert "reproduction" in invoke("submit", "--verify", out, "--no-proof").stdout


def test_figures_are_those_of_the_runs(
    seeds: list[Path], source: RunFolder, written: Path, tiny_run: TinyRun
) -> None:
    tree = json.loads((written / "submission.json").read_text())
    bpbs = [json.loads((run / "score-adapt.json").read_text())["bpb"] for run in seeds]
    assert tree["seeds"] == [1, 42, 1337]
    assert tree["val_bpb"] == pytest.approx(mean(bpbs), rel=1e-12)
    assert tree["val_bpb_std"] == pytest.approx(stdev(bpbs), rel=1e-9) and stdev(bpbs) > 0
    script = (written / "train_gpt.py").read_bytes()
    assert script == train_script(tiny_run.recipe)
    model_bytes = source.artifact_file.stat().st_size
    assert (tree["bytes_code"], tree["bytes_total"]) == (len(script), model_bytes + len(script))
    assert (tree["track"], tree["score_method"]) == ("non_record_16mb", "adapt")
    assert tree.keys() == KEYS and all(r.keys() == SEED_KEYS for r in tree["seed_results"].values())
    assert (tree["author"], tree["github_id"], tree["name"]) == ("A Name", "a-name", "A title")
    page = (written / "README.md").read_text()
    for text in (f"{len(script):,} bytes", f"{tree['val_bpb']:.6f}", "non-record", "SmearGate"):
        assert text in page
    log = (written / "train_seed42.log").read_text()
    assert log.count("\nstep:") == 30
    assert re.search(r"final method:adapt val_loss:[\d.]+ val_bpb:[\d.]+ eval_time:\d+ms\n\Z", log)


@pytest.mark.slow
def test_the_audit_of_foreign_submissions_reads_the_folder(
    source: RunFolder, tmp_path: Path
) -> None:
    write_submission([source.path], tmp_path / "one", ME)
    findings = {f.rule: f for f in audit_submission(tmp_path / "one").findings}
    assert [rule for rule, f in findings.items() if f.verdict == "fail"] == ["coverage"]
    # Right: the tiny text is not the contest's.
    assert "of 50,000 documents" in findings["coverage"].summary
    read = ("folder", "size", "claims", "time", "scoring time", "static scan")
    assert {findings[rule].verdict for rule in read} == {"pass"}


def test_one_run_is_a_submission_that_lacks_seeds(source: RunFolder, tmp_path: Path) -> None:
    tree = write_submission([source.path], tmp_path / "one", Author())
    assert tree["val_bpb_std"] is None
    found = verdicts(check_submission(tmp_path / "one", CAP))
    assert (found["runs"], found["submission.json"]) == ("not shown", "not shown")
    assert set(found.values()) == {"pass", "not shown"}


def unfinished(run: RunFolder) -> None:
    run.weights_file.unlink()


def unpacked(run: RunFolder) -> None:
    run.artifact_file.unlink()


def unscored(run: RunFolder) -> None:
    run.score_file("adapt").unlink()


def unaudited(run: RunFolder) -> None:
    run.audit_file.unlink()


def failed(run: RunFolder) -> None:
    write_audit(run, "fail")


def changed_after_the_audit(run: RunFolder) -> None:
    change_json(run.validation_file, step=31)


def scored_before_packing(run: RunFolder) -> None:
    change_json(run.score_file("adapt"), artifact_sha256="0" * 64)
    write_audit(run)


def change_packing(run: RunFolder, **values: object) -> None:
    tensors, about = read_tensors(run.quantized_file)
    save_tensors(run.quantized_file, tensors, about | values)
    write_audit(run)


def packed_without_the_script(run: RunFolder) -> None:
    change_packing(run, script_bytes=None)


def packed_with_another_script(run: RunFolder) -> None:
    change_packing(run, script_bytes=50_000)


def packed_with_another_cap(run: RunFolder) -> None:
    change_packing(run, cap_bytes=9_000_000)


def packed_by_other_rules(run: RunFolder) -> None:
    part = replace(run.read_recipe().quant, rules=("* int7:14",))
    pack_run(run, part=part, script_bytes=1)


def packed_without_the_tokenizer(run: RunFolder) -> None:
    pack_run(run, tokenizer_inside=False, script_bytes=1)


def other_version(run: RunFolder) -> None:
    versions = run.read_json(run.about_file)["versions"]
    change_json(run.about_file, versions=versions | {"underpar": "0.0.1"})
    write_audit(run)


def without_values(run: RunFolder) -> None:
    run.validation_file.write_text("{}")
    write_audit(run)


def not_even_a_table(run: RunFolder) -> None:
    run.audit_file.write_text("[]")


REFUSED: list[tuple[Callable[[RunFolder], None], str]] = [
    (
        unfinished,
        "weights.safetensors does not exist; run 'underpar train .*' first",
    ),
    (unpacked, "model.upar does not exist; run 'underpar pack .*' first"),
    (unscored, "score-adapt.json does not exist; run 'underpar score .* --adapt' first"),
    (unaudited, "audit.json does not exist; run 'underpar audit .*' first"),
    (failed, r"fails its audit \(size, "),
    (
        changed_after_the_audit,
        r"is of other files \(validation.json changed\); run 'underpar",
    ),
    (scored_before_packing, "is the score of another artifact"),
    (packed_without_the_script, r"code counted \(that of score.py\) .* --for-submission"),
    (packed_with_another_script, r"code counted \(50000 bytes\) .* --for-submission"),
    (packed_by_other_rules, "was packed with --set"),
    (packed_without_the_tokenizer, "was packed with --tokenizer-apart"),
    (packed_with_another_cap, "was packed with --cap"),
    (other_version, "was trained by underpar 0.0.1"),
    (without_values, "validation.json: seconds is missing"),
    (not_even_a_table, "audit.json"),
]


@pytest.mark.parametrize(("damage", "message"), REFUSED, ids=[d.__name__ for d, _ in REFUSED])
def test_a_run_that_is_not_ready_is_refused(
    damage: Callable[[RunFolder], None], message: str, source: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(source.path, tmp_path / "run"))
    damage(run)
    with pytest.raises(UnderparError, match=message) as error:
        write_submission([run.path], tmp_path / "out", ME)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def other_recipe(run: RunFolder) -> None:
    text = run.recipe_file.read_text()
    run.recipe_file.write_text(text.replace("matrix_lr = 0.026", "matrix_lr = 0.03"))


def other_data(run: RunFolder) -> None:
    change_json(run.about_file, data_identity="0" * 16)


def other_ranks(run: RunFolder) -> None:
    change_json(run.about_file, ranks=2)


def nothing(run: RunFolder) -> None:
    pass


@pytest.mark.parametrize(
    ("seed", "change", "message"),
    [
        (2, other_recipe, r"differ in train.matrix_lr \(.*0.03.*\); a submission is one recipe"),
        (2, other_data, "differ in their data_identity"),
        (2, other_ranks, "differ in their ranks"),
        (1337, nothing, "two runs have seed 1337"),
    ],
)
def test_runs_that_differ_in_more_than_their_seed_are_refused(
    seed: int,
    change: Callable[[RunFolder], None],
    message: str,
    source: RunFolder,
    tmp_path: Path,
) -> None:
    run = copy_run(source, tmp_path / "run", seed)
    change(run)
    write_audit(run)
    with pytest.raises(UnderparError, match=message) as error:
        write_submission([source.path, run.path], tmp_path / "out", ME)
    assert "\n" not in str(error.value)


def test_a_run_over_the_cap_is_refused_with_the_train_script_counted(
    source: RunFolder, tiny_run: TinyRun, tmp_path: Path
) -> None:
    total = source.artifact_file.stat().st_size + len(train_script(tiny_run.recipe))
    with pytest.raises(UnderparError, match=f"= {total} bytes, 1 over the cap"):
        write_submission([source.path], tmp_path / "out", ME, cap_bytes=total - 1)
    assert write_submission([source.path], tmp_path / "out", ME, cap_bytes=total)
    size = {f.rule: f for f in check_submission(tmp_path / "out", total - 1)}["size"]
    assert size.verdict == "fail"


def test_packing_for_a_submission_counts_the_train_script(
    source: RunFolder, tiny_run: TinyRun
) -> None:
    counted = read_about(source.quantized_file)["script_bytes"]
    assert counted == len(train_script(tiny_run.recipe)) > source.script_file.stat().st_size


def test_the_pack_command_counts_the_train_script(tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = RunFolder(shutil.copytree(tiny_run.folder.path, tmp_path / "run"))
    packed = run_json("pack", folder.path, "--for-submission", "--device", "cpu")
    assert packed["classes"]["code"] == len(train_script(tiny_run.recipe))
    # A rounded model was made for one size of code; for another it is made again.
    assert pack_run(folder).classes["code"] < packed["classes"]["code"]


def test_a_folder_in_the_way_is_kept(source: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    for overwrite, message in ((False, "exists; choose another"), (True, "no submission folder")):
        with pytest.raises(UnderparError, match=message):
            write_submission([source.path], out, ME, overwrite=overwrite)
    assert (out / "mine.txt").read_text() == "kept"
    write_submission([source.path], tmp_path / "new", ME)
    (tmp_path / "new" / "mine.txt").write_text("gone")
    write_submission([source.path], tmp_path / "new", ME, overwrite=True)
    assert not (tmp_path / "new" / "mine.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]


def test_a_write_that_fails_leaves_the_old_folder(
    source: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_submission([source.path], out, ME)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(underpar.stages.submit, "write_json", full)
    with pytest.raises(OSError, match="No space"):
        write_submission([source.path], out, ME, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        text = path.read_bytes()
        assert old.encode() in text
        path.write_bytes(text.replace(old.encode(), new.encode()))

    return change


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def set_values(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "submission.json", **values)


WRONG: list[tuple[str, Callable[[Path], None], str]] = [
    ("no README", drop("README.md"), "files"),
    ("no log", drop("train_seed42.log"), "runs"),
    ("no script", drop("train_gpt.py"), "script"),
    ("no JSON", drop("submission.json"), "submission.json"),
    ("not JSON", edit("submission.json", "{", ""), "submission.json"),
    ("a list", lambda folder: (folder / "submission.json").write_text("[]") and None, "files"),
    ("another mean", set_values(val_bpb=1.05), "submission.json"),
    ("no number", set_values(val_bpb="1.05"), "submission.json"),
    ("fewer bytes of code", set_values(bytes_code=20_000), "size"),
    ("a smaller total", set_values(bytes_total=200_000), "size"),
    ("another script", set_values(code_sha256="0" * 64), "script"),
    ("more code", lambda folder: _append(folder / "train_gpt.py"), "script"),
    (
        "another score in a log",
        edit("train_seed42.log", "final method:adapt val_loss:", "x"),
        "runs",
    ),
    ("another recipe in a log", edit("train_seed42.log", "matrix_lr = 0.026", "a = 1"), "runs"),
    ("another size in a log", edit("train_seed42.log", "model_bytes:", "model_bytes:9"), "size"),
    ("seeds twice", set_values(seeds=[1, 1, 1337]), "runs"),
    ("no seeds", set_values(seeds=None), "runs"),
]


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\nimport os\n")


@pytest.mark.parametrize(("change", "rule"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_folder_fails_by_a_named_check(
    change: Callable[[Path], None], rule: str, written: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(written, tmp_path / "record")
    assert set(verdicts(check_submission(folder, CAP)).values()) == {"pass"}
    change(folder)
    assert verdicts(check_submission(folder, CAP))[rule] == "fail"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "submit needs RUN"),
        (("run",), "submit needs RUN"),
        (("--verify", "folder"), "neither train_gpt.py nor submission.json"),
        (("run", "--verify", "folder"), "leave out runs and --out"),
    ],
)
def test_words_that_do_not_go_together_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UnderparError, match=message):
        invoke("submit", *words)
