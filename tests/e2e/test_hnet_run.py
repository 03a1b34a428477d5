"""A byte-level network goes the same way as any other: train, pack, score, audit, code, write."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import underpar
from small_data import decoded, write_jsonl
from trained import any_bytes
from underpar.api import Model
from underpar.audit.finding import FAIL
from underpar.build.recipe import load_checked
from underpar.cli import app
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.errors import ArtifactError, DataError
from underpar.recipe import Recipe
from underpar.score.method import ADAPT, PLAIN
from underpar.stages.audit import AuditRequest, audit_run
from underpar.stages.export import export
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact
from underpar.stages.train import train

SMALL = [
    "train.budget_steps=6",
    "model.num_layers=2",
    "model.dim=48",
    "hnet.dim=32",
    "levers.partial_rope.dims=4",
    "hnet.levers.partial_rope.dims=4",
    "levers.lora_ttt.rank=4",
    "levers.lora_ttt.lr=0.01",
    "levers.lora_ttt.chunk=32",
]


@pytest.fixture(scope="module", params=["hnet-m1-fixed+cpu", "hnet-m2+cpu"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def recipe(name: str) -> Recipe:
    return load_checked(name, SMALL)


@pytest.fixture(scope="module")
def run(
    recipe: Recipe,
    data_for: Callable[[Recipe], Path],
    tmp_path_factory: pytest.TempPathFactory,
    runtime: Runtime,
) -> RunFolder:
    """Trained, packed, scored plainly and with adaptation."""
    folder = RunFolder(tmp_path_factory.mktemp("hnet") / "run")
    assert train(recipe, data_for(recipe), folder, runtime)["finished"]
    pack_run(folder)
    for method in (PLAIN, ADAPT):
        score_artifact(folder.artifact_file, data_for(recipe), runtime, method)
    return folder


@pytest.fixture(scope="module")
def model(run: RunFolder) -> Model:
    return underpar.load(run.artifact_file)


def test_it_learns_and_is_scored(run: RunFolder) -> None:
    losses = [line["loss"] for line in run.metrics()]
    # ln 260: a choice among all ids.
    assert losses[0] == pytest.approx(5.5607, abs=1e-4)
    assert losses[-1] < losses[0] - 1
    for line in run.metrics():
        assert 1 <= line["bytes_per_chunk"] < 128
        assert 0 <= line["lost_chunks"] < 0.75
    scores = [json.loads(file.read_text()) for file in run.path.glob("score-*.json")]
    assert len(scores) == 2
    assert all(0 < score["bpb"] < 8.03 for score in scores)


@pytest.mark.slow
def test_the_audit_finds_nothing_wrong(run: RunFolder, runtime: Runtime) -> None:
    request = AuditRequest(num_documents=2, code_tokens=300, num_retrained=1, seed=0)
    audited = audit_run(run, runtime, request)
    wrong = [finding for finding in audited.findings if finding.verdict == FAIL]
    assert not wrong, wrong
    shown = {finding.rule for finding in audited.findings if finding.verdict == "pass"}
    assert {"causality", "normalization", "reproduction", "script"} <= shown
    # The plain score is decoded. No codec follows adapt_scales.
    [coded] = [finding for finding in audited.findings if finding.rule == "coded bits"]
    assert coded.evidence["scores"]["plain"]["passed"] and coded.evidence["not_coded"]


@pytest.mark.parametrize(
    "text",
    [b"", b"a", b"abc", b"\x00", b"\x00" * 50, b"\xff\xfe\x80 not UTF-8 \xc3", bytes(range(256))],
)
def test_bytes_are_bytes(model: Model, text: bytes) -> None:
    assert model.decompress(model.compress(text)) == text


@settings(max_examples=10, deadline=None)
@given(any_bytes)
def test_any_bytes_come_back(model: Model, text: bytes) -> None:
    assert model.decompress(model.compress(text)) == text


@settings(max_examples=5, deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_a_score_is_the_codes_length(model: Model, text: bytes) -> None:
    packed = len(model.compress(text))
    overhead = len(model.compress(b""))
    assert 8 * packed == pytest.approx(model.score(text).bits + 8 * overhead, abs=48)


def test_a_file_that_adapts_has_the_bits_of_its_score(model: Model) -> None:
    text = b"Bytes are bytes. " * 12
    few, many = (len(model.compress(raw, adapt=True)) for raw in (text[:17], text))
    bits = model.score(text, adapt=True).bits
    assert model.decompress(model.compress(text, adapt=True)) == text
    assert abs(bits - model.score(text).bits) > 16
    # Both files have the same header.
    between = bits - model.score(text[:17], adapt=True).bits
    assert 8 * (many - few) == pytest.approx(between, abs=16)


def test_it_writes(model: Model) -> None:
    first = model.generate("The ", max_tokens=12, seed=1)
    assert isinstance(first, str) and first == model.generate("The ", max_tokens=12, seed=1)


def test_inspect_shows_chunks(run: RunFolder, model: Model, tmp_path: Path, name: str) -> None:
    text, page = "The cat sat, \u00e9 on the mat.", tmp_path / "page.html"
    args = ["inspect", str(run.path), text]
    result = CliRunner().invoke(app, [*args, "--json", "--html", str(page)])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)["chunks"]
    chunks = model.chunks(text)
    assert b"".join(chunks) == text.encode()
    assert shown == [chunk.decode(errors="replace") for chunk in chunks]
    assert f"{len(chunks)} of {len(text.encode()) / len(chunks):.2f} bytes" in page.read_text()
    if name.startswith("hnet-m1"):
        # The first chunk also holds the token that begins the document.
        assert [len(chunk) for chunk in chunks] == [3, 4, 4, 4, 4, 4, 4, 2][: len(chunks)]
    assert model.chunks("") == []
    assert "chunks" in CliRunner().invoke(app, args).output


def test_documents_shorter_than_a_stride_train_pack_and_score(tmp_path: Path, name: str) -> None:
    texts = ["a", "ab", "\x00", "abc\x00d", "\ufffd", *(f"text {i} " * 40 for i in range(20))]
    file = tmp_path / "texts.jsonl"
    write_jsonl(file, texts)
    changes = {key: value for key, _, value in (line.partition("=") for line in SMALL)}
    changes |= {"data.holdout": "0.4", "train.budget_steps": "2"}
    plain = {key: json.loads(value) for key, value in changes.items()}
    data = underpar.build_data(file, tmp_path / "data", name, set=plain)
    assert sorted(decoded(data, data.train) + decoded(data, data.val)) == sorted(
        text.encode() for text in texts
    )
    assert underpar.train(name, tmp_path / "data", tmp_path / "run", set=plain).finished
    underpar.pack(tmp_path / "run")
    assert underpar.score(tmp_path / "run", tmp_path / "data").score.bpb > 0
    write_jsonl(file, ["", *texts])
    with pytest.raises(DataError, match="line 1: empty document"):
        underpar.build_data(file, tmp_path / "other", name, set=plain)


def test_what_a_byte_level_network_cannot_do_is_said(
    run: RunFolder, tmp_path: Path, runtime: Runtime
) -> None:
    with pytest.raises(ArtifactError, match="an H-Net cuts its text into chunks"):
        export(run.artifact_file, tmp_path / "model.pt2", runtime)
