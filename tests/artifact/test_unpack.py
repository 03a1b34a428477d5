"""Reading: one tensor or all, the tokenizer inside or beside, and headers that lie."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_scheme import draw_artifact, draw_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_reader import read_integers

from underpar.artifact.format import frame, squeeze, unframe, unsqueeze
from underpar.artifact.pack import NUM_SECTIONS, Artifact, lines_of, pack, unpack
from underpar.artifact.table import MAX_HEADER_BYTES
from underpar.artifact.unpack import LazyArtifact
from underpar.build.artifact import read_artifact
from underpar.build.model import build_predictor, weight_shapes
from underpar.errors import ArtifactError, UnderparError
from underpar.quant.rules import quantize_model
from underpar.quant.schemes import dequantize
from underpar.recipe import Recipe
from underpar.submit.bundle import ENTRY, module_closure

ARTIFACT = draw_artifact()
PACKED = pack(ARTIFACT)
NAMED = pack(ARTIFACT, tokenizer_inside=False)

Edit = Callable[[dict[str, Any]], None]


def edit(data: bytes, change: Edit) -> bytes:
    """The file with another header and a right checksum."""
    sections = unframe(data, NUM_SECTIONS)
    header = json.loads(unsqueeze(sections[0], MAX_HEADER_BYTES))
    change(header)
    return frame([squeeze(json.dumps(header).encode()), *sections[1:]])


def row_of(header: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in header["tensors"] if row["name"] == name)


def test_tensors_read_one_by_one_are_those_of_unpack() -> None:
    file = LazyArtifact(PACKED)
    assert [(r.name, r.shape, r.scheme) for r in file.rows.values()] == [
        (name, t.shape, t.scheme) for name, t in ARTIFACT.tensors.items()
    ]
    tensors = {name: file.read(name) for name in reversed([*file.rows])}
    in_order = {name: tensors[name] for name in file.rows}
    lazily = Artifact(file.header.recipe, file.read_tokenizer(), in_order, file.activations)
    assert lazily.equals(unpack(PACKED))
    assert lazily.equals(ARTIFACT)
    with pytest.raises(ArtifactError, match="no tensor 'missing'"):
        file.read("missing")


@pytest.mark.parametrize(("seed", "shape"), [(0, (6, 8)), (1, (70, 12))])
def test_the_documented_format_is_enough_to_read_a_file(seed: int, shape: tuple[int, int]) -> None:
    artifact = draw_artifact(seed, shape)
    # Widths that follow log steps are stored in another way.
    rng = np.random.default_rng(seed)
    codes = rng.standard_normal(shape) * 2.0 ** (-np.arange(shape[0])[:, None] / 8)
    steps = (2 * np.arange(shape[0]) - 60).astype(np.int16)
    artifact.tensors["follows"] = replace(
        artifact.tensors["plain.grid1"], steps=steps, codes=np.rint(90 * codes).astype(np.int16)
    )
    integers, lines, activations = read_integers(pack(artifact))
    assert activations == list(artifact.activations.values())
    for name, tensor in artifact.tensors.items():
        assert [line.tolist() for line in lines_of(tensor)] == lines[name]
        assert tensor.codes is None or tensor.codes.reshape(-1).tolist() == integers[name]


def test_one_tensor_is_read_though_another_is_damaged() -> None:
    sections = unframe(PACKED, NUM_SECTIONS)
    codes = bytearray(sections[4])
    codes[-10:] = bytes(10)
    file = LazyArtifact(frame([*sections[:4], bytes(codes), sections[5]]))
    first = file.read("plain.int6")
    assert np.array_equal(dequantize(first), dequantize(ARTIFACT.tensors["plain.int6"]))
    with pytest.raises(ArtifactError, match="weight stream"):
        file.unpack()


def test_a_tokenizer_apart_is_needed_and_checked() -> None:
    assert len(NAMED) < len(PACKED) + 150
    assert ARTIFACT.tokenizer not in NAMED
    assert unpack(NAMED, ARTIFACT.tokenizer).equals(ARTIFACT)
    with pytest.raises(ArtifactError, match=r"needs the tokenizer of SHA-256 [0-9a-f]{64}; none"):
        unpack(NAMED)
    with pytest.raises(ArtifactError, match=r"tokenizer has SHA-256 [0-9a-f]{64}: the artifact"):
        unpack(NAMED, ARTIFACT.tokenizer + b"x")


def test_a_tokenizer_apart_lies_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.upar"
    path.write_bytes(NAMED)
    with pytest.raises(ArtifactError, match=r"tokenizer\.model.*No such file"):
        read_artifact(path)
    (tmp_path / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(ArtifactError, match=r"model\.upar: tokenizer has SHA-256"):
        read_artifact(path)
    (tmp_path / "tokenizer.model").write_bytes(ARTIFACT.tokenizer)
    assert read_artifact(path)[0].equals(ARTIFACT)
    path.write_bytes(PACKED)
    (tmp_path / "tokenizer.model").unlink()
    assert read_artifact(path)[0].equals(ARTIFACT)


@pytest.mark.parametrize(
    "claim",
    [
        {"bytes": -1},
        {"bytes": 10**12},
        {"bytes": 2.0},
        {"bytes": True},
        {"sha256": "00"},
        {"sha256": "zz" * 32},
        {"sha256": 7},
    ],
)
def test_a_senseless_tokenizer_is_refused(claim: dict[str, Any]) -> None:
    forged = edit(NAMED, lambda header: header["tokenizer"].update(claim))
    with pytest.raises(ArtifactError, match="header cannot be used"):
        LazyArtifact(forged)


def test_a_file_holds_its_tokenizer_or_names_it() -> None:
    sections = unframe(NAMED, NUM_SECTIONS)
    with pytest.raises(ArtifactError, match="hold its tokenizer or to name it"):
        LazyArtifact(frame([sections[0], b"x", *sections[2:]]))
    with pytest.raises(ArtifactError, match="hold its tokenizer or to name it"):
        LazyArtifact(edit(NAMED, lambda header: header.pop("tokenizer")))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("plain.int6", {"shape": [10**9, 10**9]}, "whole number"),
        ("plain.int6", {"shape": [2**20, 2**20]}, "weights"),
        ("plain.int6", {"shape": [-6, 8]}, "whole number"),
        ("plain.int6", {"shape": [True, 8]}, "whole number"),
        ("plain.int6", {"shape": [0, 8]}, "whole number"),
        ("plain.int6", {"shape": [1] * 5}, "axes"),
        ("plain.int6", {"shape": []}, "weight stream"),
        ("plain.int6", {"shape": [8, 6]}, "grows past|steps"),
        ("plain.int6", {"scheme": "int99"}, "scheme"),
        ("plain.int6", {"scheme": "int6/0"}, "grows past|steps"),
        ("gate", {"scheme": "int8/1"}, "grows past|steps"),
        ("plain.int6", {"scheme": "int6+log"}, "weight stream|log step"),
        ("plain.gptq6:12.85+log", {"scheme": "gptq6:12.85"}, "weight stream|log step|steps"),
        ("plain.int6", {"scheme": None}, "header cannot"),
        ("plain.int6", {"scheme": "ternary:7"}, "whole runs"),
        ("plain.int6", {"scheme": "ternary:4"}, "grows past|steps"),
        ("plain.int6", {"bytes": 10**9}, "table says"),
        ("plain.int6", {"bytes": -4}, "whole number"),
        ("plain.int6", {"low": 10**6}, "whole number"),
        ("plain.int6", {"low": -20.5}, "whole number"),
        ("plain.int6", {"freqs": [1, 2, 3]}, "frequencies"),
        ("plain.int6", {"freqs": []}, "frequencies"),
        ("plain.int6", {"freqs": [2**70]}, "whole number"),
        ("plain.int6", {"freqs": [16384] + [0] * 256}, "whole number"),
        ("plain.int6", {"name": 7}, "tensor 7"),
        ("plain.int6", {"name": "line\nbreak"}, "line.*break"),
        ("plain.int6", {"name": "plain.int8"}, "twice"),
        ("plain.grid1", {"shape": [48]}, "no matrix"),
        ("plain.grid1", {"shape": [1, 2**26]}, "columns"),
        ("plain.grid1", {"shape": [2**26, 1]}, "weight stream"),
        ("plain.grid1", {"scheme": "grid1+columns"}, "weight stream|log step"),
        ("plain.grid1", {"scheme": "grid5"}, "scheme"),
        ("plain.gptq7:14+awq", {"shape": [48]}, "no matrix"),
        ("plain.fp16", {"correction": {}}, "a correction of fp16"),
        ("plain.ternary:4", {"correction": {}}, "a correction of ternary:4"),
        ("plain.int6", {"correction": {}}, "rank"),
        ("plain.int6", {"correction": 3}, "header cannot"),
    ],
)
def test_lies_in_the_table_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    forged = edit(PACKED, lambda header: row_of(header, name).update(change))
    with pytest.raises(ArtifactError, match=message):
        unpack(forged)


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("", {"rank": 0}, "from 1 to 6"),
        ("", {"rank": 7}, "from 1 to 6"),
        ("", {"rank": 1}, "weight stream|log step"),
        ("", {"rank": 2.0}, "from 1 to 6"),
        ("", {"left": None}, "header cannot"),
        ("left", {"group": 0}, "from 1 to"),
        ("left", {"group": 2**40}, "from 1 to"),
        ("left", {"group": 1}, "weight stream|log step"),
        ("right", {"low": 121}, "from -128 to"),
        ("right", {"freqs": [16384, 1]}, "frequencies"),
        ("right", {"bytes": 5}, "table says"),
    ],
)
def test_lies_about_a_correction_are_refused(
    side: str, change: dict[str, Any], message: str
) -> None:
    def lie(header: dict[str, Any]) -> None:
        correction = row_of(header, "corrected.grid1")["correction"]
        (correction[side] if side else correction).update(change)

    with pytest.raises(ArtifactError, match=message):
        unpack(edit(PACKED, lie))


def test_a_rank_above_64_is_refused() -> None:
    tensor = draw_tensor("int6", (80, 80), np.random.default_rng(0))
    data = pack(Artifact(Recipe(), b"", {"a": tensor}))
    factor = {"group": 64, "low": 0, "freqs": [16384], "bytes": 4}
    lie = {"correction": {"rank": 65, "left": factor, "right": factor}}
    with pytest.raises(ArtifactError, match="65 for a whole number from 1 to 64"):
        unpack(edit(data, lambda header: header["tensors"][0].update(lie)))


@pytest.mark.parametrize(
    ("key", "value"), [("num_layers", 10**9), ("context", 10**12), ("dim", 2**40), ("softcap", "x")]
)
def test_a_senseless_recipe_is_refused(key: str, value: object) -> None:
    forged = edit(PACKED, lambda header: header["recipe"]["model"].update({key: value}))
    with pytest.raises(ArtifactError, match=key):
        unpack(forged)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ArtifactError, match="no tensors"):
        unpack(edit(PACKED, lambda header: header["tensors"].clear()))


def test_a_step_that_is_not_finite_is_refused() -> None:
    sections = unframe(PACKED, NUM_SECTIONS)
    halves = bytearray(unsqueeze(sections[2], 1 << 20))
    halves[3] = 0x7E
    with pytest.raises(ArtifactError, match="not finite"):
        unpack(frame([*sections[:2], squeeze(bytes(halves)), *sections[3:]]))


def test_the_counted_script_reads_but_does_not_write() -> None:
    shipped = module_closure([ENTRY])
    assert "underpar.artifact.unpack" in shipped
    encoders = {"pack", "array_encoder", "matrix_encoder", "rans_encoder", "width_fit", "viterbi"}
    assert not encoders & {m.split(".")[-1] for m in shipped}


@pytest.fixture(scope="module")
def tiny_file(tiny_recipe: Recipe) -> bytes:
    rng = np.random.default_rng(0)
    shapes = weight_shapes(tiny_recipe)
    weights = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    rules = tiny_recipe.quant.rules
    return pack(Artifact(tiny_recipe, b"tokenizer", quantize_model(weights, rules)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_mutated_model_is_refused_or_built(tiny_file: bytes, data: st.DataObject) -> None:
    sections = [bytearray(s) for s in unframe(tiny_file, NUM_SECTIONS)]
    target = bytearray(unsqueeze(bytes(sections[0]), MAX_HEADER_BYTES))
    for _ in range(data.draw(st.integers(1, 3))):
        target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(32, 126))
    sections[0] = bytearray(squeeze(bytes(target)))
    try:
        artifact = unpack(frame([bytes(s) for s in sections]))
        build_predictor(artifact, torch.device("cpu"))
    except UnderparError as error:
        assert "\n" not in str(error)
