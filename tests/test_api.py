"""The Python interface, as the README shows it."""

from pathlib import Path

import numpy as np
import pytest

import underpar
from tiny import TinyRun
from underpar.errors import ArtifactError, DataError, UnderparError


def test_load_score_generate_compress(tiny_run: TinyRun) -> None:
    model = underpar.load(str(tiny_run.folder.artifact_file))
    text = "The government of the people. \u00e9\u4e2d"
    score = model.score(text)
    assert score.num_bytes == len(text.encode())
    assert 0 < score.bpb < 20
    assert isinstance(model.generate("Once upon", max_tokens=4), str)
    data = b"any bytes \xff\x00"
    assert model.decompress(model.compress(data)) == data


def test_a_score_is_the_codes_length(tiny_run: TinyRun) -> None:
    model = underpar.load(tiny_run.folder.artifact_file)
    text = "It is a truth universally acknowledged. " * 20
    from underpar.codec.lanes import encode_documents

    tokens = model.codec.tokenizer.encode(text.encode())
    payload = encode_documents(model.codec.predictor, [tokens], 1)
    assert 8 * len(payload) == pytest.approx(model.score(text).bits, abs=16)


def test_an_empty_text_has_no_score(tiny_run: TinyRun) -> None:
    with pytest.raises(DataError, match="empty"):
        underpar.load(tiny_run.folder.artifact_file).score("")


def test_what_is_loaded_is_what_was_packed(tiny_run: TinyRun, tmp_path: Path) -> None:
    data = bytearray(tiny_run.folder.artifact_file.read_bytes())
    place = int(np.random.default_rng(0).integers(len(data)))
    data[place] ^= 1
    (tmp_path / "bad.upar").write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match=r"bad\.upar"):
        underpar.load(tmp_path / "bad.upar")
    with pytest.raises(UnderparError, match=r"none\.upar"):
        underpar.load(tmp_path / "none.upar")
