"""Options of compress: adapters, documents, an index, no check; files and pipes."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import invoke, run_json
from tiny_codec import POEM, tiny_codec, write_artifact
from underpar.codec import stream
from underpar.codec.frame import ADAPTED, PLAIN, STORED, read_frame
from underpar.codec.stream import Codec
from underpar.errors import CodecError

LINES = [b"the cat", b"", b"sat on the mat", b"|", b"the dog", b"a log, a log, a log"]
MODES: list[dict[str, Any]] = [
    {},
    {"adapt": True},
    {"separator": b"|"},
    {"separator": b"|", "adapt": True},
    {"separator": b"|", "indexed": True},
]


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_says_how_it_was_made(options: dict[str, Any], verify: bool) -> None:
    codec, shares = tiny_codec(), [0.0]
    compressed = codec.compress(POEM * 2, shares.append, verify=verify, **options)
    frame = read_frame(compressed)
    assert frame.header.mode == (ADAPTED if options.get("adapt") else PLAIN)
    assert frame.header.num_documents == (9 if "separator" in options else 1)
    assert frame.verified == verify
    assert bool(frame.index) == bool(options.get("indexed"))
    assert shares == sorted(shares) and 0.5 <= shares[-1] <= 1
    assert codec.decompress(compressed) == POEM * 2


@pytest.mark.parametrize("options", MODES)
@settings(max_examples=8, deadline=None)
@given(
    parts=st.lists(st.one_of(st.sampled_from(LINES), st.binary(max_size=12)), max_size=5),
    repeat=st.integers(1, 3),
)
def test_any_bytes_come_back(options: dict[str, Any], parts: list[bytes], repeat: int) -> None:
    data = b"|".join(parts) * repeat
    codec = tiny_codec()
    assert codec.decompress(codec.compress(data, verify=False, **options)) == data


def test_an_index_gives_any_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "INDEXED_LANES", 3)
    codec, data = tiny_codec(), POEM * 2
    compressed = codec.compress(data, separator=b"|", indexed=True)
    for number, document in enumerate(data.split(b"|")):
        assert codec.decompress(compressed, document=number) == document
    for number in (-1, 9):
        with pytest.raises(CodecError, match="the file has 9"):
            codec.decompress(compressed, document=number)
    frame = read_frame(compressed)
    other = dataclasses.replace(frame, index=frame.index[:-1] + b"x").to_bytes()
    with pytest.raises(CodecError, match="differs from the original"):
        codec.decompress(other, document=8)
    for index in (frame.index[:-4], b"\xff" * len(frame.index)):
        with pytest.raises(CodecError, match="damaged"):
            codec.decompress(dataclasses.replace(frame, index=index).to_bytes())


def test_files_without_an_index_say_why() -> None:
    codec = tiny_codec()
    with pytest.raises(CodecError, match="depends on those before"):
        codec.decompress(codec.compress(POEM, separator=b"|", adapt=True), document=0)
    with pytest.raises(CodecError, match="has no index"):
        codec.decompress(codec.compress(POEM, separator=b"|"), document=0)
    for options in ({"adapt": True, "separator": b"|"}, {}):
        with pytest.raises(CodecError, match="an index is of documents"):
            codec.compress(POEM, indexed=True, **options)
    with pytest.raises(CodecError, match="at most 255"):
        codec.compress(POEM, separator=bytes(256))


def test_an_adapted_file_of_other_settings_is_refused() -> None:
    codec = tiny_codec()
    compressed = codec.compress(POEM, adapt=True)
    assert codec.open_adaptation is not None
    other = dataclasses.replace(codec.open_adaptation(), digest="0" * 16)
    with pytest.raises(CodecError, match="compressed with settings"):
        dataclasses.replace(codec, open_adaptation=lambda: other).decompress(compressed)
    with pytest.raises(CodecError, match="has learned already"):
        dataclasses.replace(codec, open_adaptation=None).decompress(compressed)


def test_an_adapted_file_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = tiny_codec()
    compressed = codec.compress(POEM, adapt=True)
    monkeypatch.setattr(stream, "fingerprint", lambda predictor: "torch 9.9 elsewhere")
    with pytest.raises(CodecError, match=r"torch 9\.9 elsewhere"):
        codec.decompress(compressed)
    assert codec.decompress(compressed, any_machine=True) == POEM


@pytest.mark.parametrize("options", [{}, {"adapt": True}])
def test_nothing_is_reported_before_it_decodes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Codec, "_checked", lambda self, header, raw: b"something else")
    with pytest.raises(CodecError, match="nothing was written"):
        tiny_codec().compress(POEM, **options)
    tiny_codec().compress(POEM, verify=False, **options)


def test_a_failed_check_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, source, out = write_artifact(tmp_path), tmp_path / "in", tmp_path / "out"
    source.write_bytes(POEM)
    out.write_bytes(b"precious")
    monkeypatch.setattr(Codec, "_checked", lambda self, header, raw: b"something else")
    with pytest.raises(CodecError, match="nothing was written"):
        invoke("compress", artifact, source, out)
    assert out.read_bytes() == b"precious"


def test_commands_code_files_and_documents(tmp_path: Path) -> None:
    artifact, source = write_artifact(tmp_path), tmp_path / "in"
    out, back = tmp_path / "out", tmp_path / "back"
    source.write_bytes(POEM)
    summary = run_json("compress", artifact, source, out, "--split", r"\x7c", "--index")
    assert (summary["documents"], summary["mode"], summary["verified"]) == (5, "plain", True)
    run_json("decompress", artifact, out, back, "--document", 4)
    assert back.read_bytes() == b"the end"
    summary = run_json("compress", artifact, source, out, "--adapt", "--no-verify")
    assert (summary["mode"], summary["verified"]) == ("adapted", False)
    run_json("decompress", artifact, out, back)
    assert back.read_bytes() == POEM
    with pytest.raises(CodecError, match="depends on those before"):
        invoke("decompress", artifact, out, back, "--document", 0)
    with pytest.raises(CodecError, match=r"--decoder-memory 0: expected more than 0 GB"):
        invoke("compress", artifact, source, out, "--exact", "--decoder-memory", 0)


def test_pipes(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path)

    def pipe(command: str, data: bytes) -> bytes:
        words = [sys.executable, "-m", "underpar", command, str(artifact), "-", "-"]
        return subprocess.run(words, input=data, capture_output=True, check=True).stdout

    compressed = pipe("compress", POEM)
    assert read_frame(compressed).header.mode == PLAIN
    assert pipe("decompress", compressed) == POEM


def test_noise_and_nothing_are_stored() -> None:
    codec = tiny_codec()
    for data in (b"", bytes(range(128, 256))):
        compressed = codec.compress(data, adapt=True, separator=b"|")
        assert read_frame(compressed).header.mode == STORED
        assert codec.decompress(compressed) == data
