"""The data commands as a user meets them: build, inspect, audit, export, import, fetch."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import invoke, run, run_json
from fake_hub import FakeHub, serve
from small_data import contents, edit_manifest, prose, write_file, write_jsonl, write_published
from underpar.data.folder import data_sha256, load_data
from underpar.data.tokens.byte260 import CONTENT, ByteTokenizer

PLAIN = ("--recipe", "baseline")
ONE = ("--workers", "1")
SIZE = (*PLAIN, "--set", "model.vocab_size=400", "--set", "data.holdout=0.2", *ONE)
BYTES = (*PLAIN, "--set", "model.vocab_size=260", "--set", "data.tokenizer='bytes'", *ONE)

Fails = Callable[..., str]


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("docs") / "docs.jsonl", prose(40))


@pytest.fixture(scope="module")
def folder(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("folder") / "data"
    run("data", "build", docs, "--out", out, *SIZE)
    return out


def test_build_says_what_it_made(docs: Path, folder: Path, tmp_path: Path) -> None:
    manifest = run_json("data", "build", docs, "--out", tmp_path, *SIZE, "--licence", "CC BY 4.0")
    assert manifest == json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["inputs"][0]["licence"] == "CC BY 4.0"
    assert manifest["tokenizer"]["vocab_size"] == 400
    ours, theirs = contents(tmp_path), contents(folder)
    assert ours.pop("manifest.json") != theirs.pop("manifest.json")
    assert ours == theirs
    output = run("data", "build", docs, "--out", tmp_path, *SIZE, "--overwrite")
    assert "400 pieces, transform identity, lossless" in " ".join(output.split())
    assert "repaired" not in output


def test_build_on_all_cores_gives_the_same(docs: Path, folder: Path, tmp_path: Path) -> None:
    run("data", "build", docs, "--out", tmp_path, *SIZE[:-2])
    assert contents(tmp_path) == contents(folder)


def test_build_takes_a_transform_and_bytes_from_the_recipe(docs: Path, tmp_path: Path) -> None:
    lever = ("--set", "levers.caseops_before=true")
    manifest = run_json("data", "build", docs, "--out", tmp_path / "a", *SIZE, *lever)
    assert manifest["tokenizer"]["transform"] == "caseops_before"
    manifest = run_json("data", "build", docs, "--out", tmp_path / "b", *BYTES)
    assert manifest["tokenizer"]["kind"] == "bytes"
    assert manifest["val"]["bytes_per_token"] == 1


def test_build_takes_a_tokenizer_and_a_published_split(
    docs: Path, folder: Path, tmp_path: Path
) -> None:
    val = write_file(tmp_path / "val.txt", b"Held out.")
    model = folder / "tokenizer.model"
    words = (*PLAIN, "--tokenizer", model, "--val", val, "--workers", 1)
    manifest = run_json("data", "build", docs, "--out", tmp_path / "out", *words)
    assert manifest["val"]["documents"] == 1
    assert manifest["split"]["fraction"] is None
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == model.read_bytes()


def test_build_repairs_only_when_asked(tmp_path: Path, fails: Fails) -> None:
    lines = [f'{{"body": "document {i}"}}'.encode() for i in range(30)]
    docs = write_file(
        tmp_path / "a.jsonl", b"\n".join([*lines, b'{"body": "\xff"}', b'{"body": ""}'])
    )
    words = ("data", "build", docs, "--out", tmp_path / "out", *BYTES)
    assert 'a.jsonl: line 1: the object has no field "text"' in fails(*words)
    words = (*words, "--field", "body")
    assert "a.jsonl: line 31: invalid UTF-8 at byte 11" in fails(*words)
    assert "bad_input is 'skip', expected 'refuse' or 'repair'" in fails(
        *words, "--bad-input", "skip"
    )
    output = run(*words, "--bad-input", "repair")
    assert "1 document repaired (1 character), 1 empty document left out" in output
    tally = run_json("data", "inspect", tmp_path / "out")["tally"]
    assert (tally["documents"], tally["left_out_empty"], tally["repaired"]) == (32, 1, 1)


def test_build_counts_and_names_what_it_skips(tmp_path: Path, fails: Fails) -> None:
    for i in range(60):
        write_file(tmp_path / "in" / f"{i}.md", b"document %d" % i)
    for name in ("a.pdf", "b.pdf", ".hidden"):
        write_file(tmp_path / "in" / name, b"x")
    out = tmp_path / "out"
    output = run("data", "build", tmp_path / "in", "--out", out, *BYTES)
    first = [str(tmp_path / "in" / name) for name in ("a.pdf", "b.pdf", ".hidden")]
    line = f"3 files skipped (2 .pdf, 1 hidden), such as {', '.join(first)}"
    assert line in output
    skipped = run_json("data", "inspect", out)["skipped"]
    assert skipped == {"files": 3, "kinds": {".pdf": 2, "hidden": 1}, "first": first}
    edit_manifest(out, lambda manifest: manifest["skipped"].update(first=[1]))
    assert "first is [1], expected a list of strings" in fails("data", "inspect", out)


def test_build_holds_out_the_first_documents(tmp_path: Path, fails: Fails) -> None:
    texts = list(prose(9))
    docs = write_jsonl(tmp_path / "docs.jsonl", texts)
    words = ("data", "build", docs, "--out", tmp_path / "out", *BYTES)
    assert "give one" in fails(*words, "--val-docs", 2, "--holdout", 0.2)
    assert "the first 10 documents cannot be held out of 9" in fails(*words, "--val-docs", 10)
    run(*words, "--val-docs", 2)
    manifest = run_json("data", "inspect", tmp_path / "out")
    assert manifest["val"]["documents"] == 2
    assert manifest["val"]["bytes"] == sum(len(text.encode()) for text in texts[:2])


def test_build_holds_out_the_end_of_a_novel(tmp_path: Path, fails: Fails) -> None:
    novel = write_file(tmp_path / "novel.txt", "\n\n".join(prose(20)).encode())
    words = ("data", "build", novel, "--out", tmp_path / "out", *BYTES)
    assert "--val, --holdout and --val-docs" in fails(*words, "--val", novel, "--holdout", 0.2)
    assert "holdout is 2.0, expected a fraction" in fails(*words, "--holdout", 2)
    refused = fails(*words, "--split-documents", -5)
    assert "split_documents is -5, expected characters, or 0 to cut none" in refused
    output = run(*words, "--holdout", 0.2)
    assert "of each, the last 20% is held out, in pieces of up to 1,000 characters" in output
    manifest = run_json("data", "inspect", tmp_path / "out")
    assert 0.15 < manifest["val"]["bytes"] / novel.stat().st_size < 0.25
    words = (*words, "--overwrite", "--holdout", 0.2, "--split-documents", 700)
    assert "the last" not in run(*words)
    assert run_json("data", "inspect", tmp_path / "out")["split"]["fraction"] == 0.2


def test_build_refuses_in_one_line(docs: Path, tmp_path: Path, fails: Fails) -> None:
    words = ("data", "build", docs, "--out", tmp_path / "out", *PLAIN)
    assert "also held out" in fails(*words, *BYTES, "--val", docs)
    assert "workers is -1, expected at least 1" in fails(*words, *SIZE[:4], "--workers", -1)
    assert "too small for vocab_size 60000" in fails(*words, "--set", "model.vocab_size=60000")
    gone = tmp_path / "gone.txt"
    assert "gone.txt: no such file" in fails("data", "build", gone, "--out", tmp_path / "out")


def test_inspect_checks_all_of_it(folder: Path, tmp_path: Path, fails: Fails) -> None:
    data = load_data(folder)
    manifest = run_json("data", "inspect", folder)
    assert manifest == data.manifest | {"data_sha256": data_sha256(data)}
    output = run("data", "inspect", folder)
    assert f"SHA-256 {data_sha256(data)}" in output
    assert f"{manifest['val']['bytes']:,}" in output
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    shard = broken / "val.shard"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    assert "val.shard: checksum does not match" in fails("data", "inspect", broken)
    assert "no finished data folder here" in fails("data", "inspect", tmp_path / "nowhere")


def words_of(name: str, num_words: int) -> str:
    return " ".join(f"{name}{i}" for i in range(num_words))


def test_audit_passes_a_clean_folder(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [words_of(f"train{i}x", 30) for i in range(10)])
    val = write_jsonl(tmp_path / "b.jsonl", [words_of(f"val{i}x", 30) for i in range(5)])
    run("data", "build", train, "--out", tmp_path / "out", *BYTES, "--val", val)
    report = run_json("data", "audit", tmp_path / "out")
    assert report["verdict"] == "pass"
    assert report["exact"]["num_across"] == report["near"]["num_pairs"] == 0
    assert "0 exact and 0 near duplicates" in run("data", "audit", tmp_path / "out")


def test_build_says_that_training_repeats_held_out_documents(
    tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [words_of(f"text{i}x", 100) for i in range(60)]
    # The hash puts some texts and their near copies on different sides.
    docs = write_jsonl(tmp_path / "a.jsonl", [*texts, *(f"{text} end" for text in texts)])
    words = ("data", "build", docs, "--out", tmp_path / "out", *BYTES, "--overwrite")
    note = " ".join(invoke(*words).stderr.split())
    assert "held-out documents nearly repeat training text or each other" in note
    assert invoke("data", "audit", tmp_path / "out").exit_code == 1
    result = invoke(*words, "--drop-near", 0.7)
    assert "left out as copies: " in result.stdout
    assert "--drop-near" not in result.stderr
    run("data", "audit", tmp_path / "out")
    assert "drop_near is 1.2, expected above 0" in fails(*words, "--drop-near", 1.2)
    monkeypatch.setattr("underpar.stages.data.MOST_SEARCHED_BYTES", 1000)
    assert "not looked for near duplicates in 0 MB" in invoke(*words).stderr


def test_audit_finds_near_duplicates_and_names_them(tmp_path: Path) -> None:
    held_out = [words_of(f"val{i}x", 100) for i in range(5)]
    copy = held_out[3].replace("val3x50", "CHANGED")
    train = [words_of(f"train{i}x", 100) for i in range(8)]
    inputs = write_jsonl(tmp_path / "a.jsonl", [*train[:6], copy, *train[6:]])
    val = write_jsonl(tmp_path / "b.jsonl", held_out)
    run("data", "build", inputs, "--out", tmp_path / "out", *BYTES, "--val", val)
    result = invoke("data", "audit", tmp_path / "out", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["verdict"], report["exact"]["num_across"]) == ("fail", 0)
    [pair] = report["near"]["worst"]
    assert (pair["train"]["index"], pair["val"]["index"]) == (6, 3)
    assert pair["val"]["text"].startswith("val3x0 val3x1")
    # Of 96 runs of five words, five hold the changed one.
    assert pair["similarity"] == pytest.approx(91 / 101)
    result = invoke("data", "audit", tmp_path / "out")
    assert result.exit_code == 1
    assert "6: 'val3x0" in result.stdout and "3: 'val3x0" in result.stdout
    assert run_json("data", "audit", tmp_path / "out", "--threshold", 0.95)["verdict"] == "pass"


def write_set(folder: Path, val: list[str], train: list[str]) -> Path:
    """Published files of byte tokens; returns the tokenizer's file."""
    for split, texts in (("val", val), ("train", train)):
        stream = ByteTokenizer().encode_texts(texts).tokens.tolist()
        write_published(folder / f"fineweb_{split}_000000.bin", stream)
    return write_file(folder / "byte260.json", CONTENT)


def test_audit_finds_exact_copies_in_an_imported_folder(tmp_path: Path, fails: Fails) -> None:
    val = [words_of(f"val{i}x", 6) for i in range(1000)]
    tokenizer = write_set(tmp_path / "set", val, ["nothing of it", val[123]])
    words = ("--out", tmp_path / "out", "--tokenizer", tokenizer)
    manifest = run_json("data", "import", tmp_path / "set", *words)
    assert manifest["shared_documents"] == 1
    result = invoke("data", "audit", tmp_path / "out", "--json")
    assert result.exit_code == 1
    [pair] = json.loads(result.stdout)["exact"]["worst"]
    assert (pair["train"]["index"], pair["val"]["index"]) == (1, 123)
    assert pair["train"]["text"] == pair["val"]["text"] == val[123][:80]
    # A folder that does not own up to it is still opened by the audit, and by nothing else.
    edit_manifest(tmp_path / "out", lambda manifest: manifest.update(shared_documents=0))
    assert "1 training documents are also in validation" in fails(
        "data", "inspect", tmp_path / "out"
    )
    assert invoke("data", "audit", tmp_path / "out").exit_code == 1


def test_export_and_import_are_inverse(folder: Path, tmp_path: Path, fails: Fails) -> None:
    export, back = tmp_path / "export", tmp_path / "back"
    assert f"exported to {export}" in run(
        "data", "export", folder, "--out", export, "--shard-tokens", 5000
    ).replace("\n", "")
    [files] = (export / "datasets").iterdir()
    assert len(list(files.glob("fineweb_train_*.bin"))) > 1
    words = ("--tokenizer", folder / "tokenizer.model", "--licence", "CC0")
    manifest = run_json("data", "import", files, "--out", back, *words)
    assert manifest["inputs"][0]["licence"] == "CC0"
    ours, theirs = contents(back), contents(folder)
    assert ours.pop("manifest.json") != theirs.pop("manifest.json")
    assert ours == theirs
    # A second export beside the first would mix two sets.
    assert "holds an export already" in fails("data", "export", folder, "--out", export)
    assert run_json("data", "export", folder, "--out", tmp_path / "other") == {
        "out": str(tmp_path / "other")
    }


def test_import_refuses_in_one_line(tmp_path: Path, fails: Fails) -> None:
    tokenizer = write_set(tmp_path / "set", ["held out"], ["training"])
    words = (
        "data",
        "import",
        tmp_path / "set",
        "--out",
        tmp_path / "out",
        "--tokenizer",
        tokenizer,
    )
    assert "looks like a partial validation set" in fails(*words, "--known", "byte260")
    assert "transform 'caseops' does not work with bytes" in fails(*words, "--transform", "caseops")
    assert not (tmp_path / "out" / "manifest.json").exists()
    write_set(tmp_path / "set", ["held out"], ["held out"])
    assert "1 training documents are also held out" in fails(*words)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with the folder's export in the place of the published sp1024."""
    monkeypatch.setenv("no_proxy", "*")
    run("data", "export", folder, "--out", tmp_path / "hub", "--shard-tokens", 5000)
    [files] = (tmp_path / "hub" / "datasets").iterdir()
    served = {f"datasets/fineweb10B_sp1024/{name}": data for name, data in contents(files).items()}
    served["datasets/tokenizers/fineweb_1024_bpe.model"] = (folder / "tokenizer.model").read_bytes()
    served["datasets/fineweb10B_sp9999/fineweb_val_000000.bin"] = b"another set"
    with serve(FakeHub(files=served)) as running:
        yield running


def test_fetched_files_can_be_imported(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    words = ("data", "fetch", "sp1024", "--out", tmp_path / "got", "--endpoint", hub.url)
    got = run_json(*words, "--train-files", 2)
    num_val = sum("sp1024/fineweb_val_" in path for path in hub.files)
    # The tokenizer, two training files, all of validation.
    assert got["num_files"] == got["num_fetched_files"] == 1 + 2 + num_val
    assert run_json(*words, "--train-files", 2)["num_fetched_files"] == 0
    assert run_json(*words)["num_fetched_files"] > 0
    assert "num_bytes" in run(*words)
    files = tmp_path / "got" / "datasets" / "fineweb10B_sp1024"
    model = tmp_path / "got" / "datasets" / "tokenizers" / "fineweb_1024_bpe.model"
    run("data", "import", files, "--out", tmp_path / "back", "--tokenizer", model)
    for name in ("train.shard", "val.shard", "tokenizer.model"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "got" / "datasets" / "fineweb10B_sp9999").exists()


def test_fetch_takes_what_is_asked_for(hub: FakeHub, tmp_path: Path, fails: Fails) -> None:
    words = ("data", "fetch", "owner/repo", "--out", tmp_path / "got", "--endpoint", hub.url)
    got = run_json(*words, "--include", "*.model", "--token", "secret")
    assert (got["repo"], got["num_files"]) == ("owner/repo", 1)
    assert all(headers["Authorization"] == "Bearer secret" for _, headers in hub.seen)
    assert "no file matches --include *.csv" in fails(*words, "--include", "*.csv")
    assert "did you mean 'sp1024'" in fails("data", "fetch", "sp102", *words[3:])


def test_fetch_without_a_network_is_one_line_and_exit_two(
    tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("data", "fetch", "sp1024", "--out", tmp_path / "out")
    line = fails(*words, "--endpoint", f"http://127.0.0.1:{port}")
    assert f"cannot reach 127.0.0.1:{port}" in line
    assert "underpar works offline, only 'data fetch' needs the network" in line
    assert not (tmp_path / "out").exists()
