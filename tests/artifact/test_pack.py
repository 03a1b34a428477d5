"""Packing: bit-exact, deterministic, and closed to hostile files."""

import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from underpar.artifact.format import frame, squeeze, unframe, unsqueeze
from underpar.artifact.pack import MAX_HEADER_BYTES, NUM_SECTIONS, Artifact, pack, unpack
from underpar.build import build_predictor, weight_shapes
from underpar.errors import ArtifactError, UnderparError
from underpar.quant import logsteps, trellis
from underpar.quant.rules import quantize_model
from underpar.quant.schemes import QuantizedTensor, Scheme
from underpar.recipe import Recipe

RULES = [
    "ints.* int6:12.85",
    "bytes.* int8",
    "grids.* grid1",
    "trellises.* grid8+columns",
    "* fp16",
]


def solve(name: str, weight: np.ndarray, scheme: Scheme) -> QuantizedTensor:
    """A grid without a calibration: steps of 0.4 deviations."""
    rows = logsteps.to_index(0.4 * weight.std(axis=1) + 1e-3)
    columns = np.arange(weight.shape[1], dtype=np.int16) % 5 if scheme.columns else None
    steps = logsteps.from_indices(rows, np.zeros(weight.shape[1]) if columns is None else columns)
    codes = trellis.quantize(torch.from_numpy(weight / steps), scheme.states).numpy()
    return QuantizedTensor(weight.shape, scheme, rows, codes.astype(np.int16), columns)


def artifact_of(weights: dict[str, np.ndarray], recipe: Recipe | None = None) -> Artifact:
    return Artifact(recipe or Recipe(), b"tokenizer", quantize_model(weights, RULES, solve))


@settings(max_examples=40, deadline=None)
@example([(1, 1), (1, 1)], 30.0, 0)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    st.sampled_from([0.0, 1.0, 30.0]),
    st.integers(0, 2**31),
)
def test_round_trip_for_any_shape(shapes: list[tuple[int, int]], scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = {
        f"{kind}.{i}": (scale * rng.standard_normal(shape)).astype(np.float32)
        for i, shape in enumerate(shapes)
        for kind in ("ints", "bytes", "halves", "grids", "trellises")
    }
    artifact = artifact_of(weights)
    data = pack(artifact)
    assert unpack(data).equals(artifact)
    assert pack(artifact) == data


def test_a_scalar_and_a_vector_round_trip() -> None:
    weights = {"ints.v": np.arange(5, dtype=np.float32), "s": np.float32(3.5).reshape(())}
    assert unpack(pack(artifact_of(weights))).equals(artifact_of(weights))


def test_equals_sees_one_code() -> None:
    weights = {"ints.a": np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)}
    ours, other = artifact_of(weights), artifact_of(weights)
    codes = other.tensors["ints.a"].codes
    assert codes is not None
    codes[3, 3] += 1
    assert not ours.equals(other)


@pytest.fixture(scope="module")
def packed(tiny_recipe: Recipe) -> bytes:
    rng = np.random.default_rng(0)
    shapes = weight_shapes(tiny_recipe)
    weights = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    rules = tiny_recipe.quant.rules
    return pack(Artifact(tiny_recipe, b"tokenizer", quantize_model(weights, rules)))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_mutated_files_with_right_checksums_never_crash(packed: bytes, data: st.DataObject) -> None:
    sections = [bytearray(s) for s in unframe(packed, NUM_SECTIONS)]
    # The header is mutated after unsqueezing too, where a change survives the compressor.
    which = data.draw(st.integers(0, NUM_SECTIONS))
    target = (
        bytearray(unsqueeze(bytes(sections[0]), MAX_HEADER_BYTES))
        if which == NUM_SECTIONS
        else sections[which]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        if target:
            target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del target[data.draw(st.integers(0, len(target))) :]
    if which == NUM_SECTIONS:
        sections[0] = bytearray(squeeze(bytes(target)))
    try:
        artifact = unpack(frame([bytes(s) for s in sections]))
        build_predictor(artifact, torch.device("cpu"))
    except UnderparError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shape": [10**9, 10**9]}, "weights"),
        ({"shape": [-4, 4]}, "malformed"),
        ({"shape": [True, 4]}, "malformed"),
        ({"shape": []}, "grows past|steps"),
        ({"scheme": "int99"}, "recipe|malformed"),
        ({"bytes": 10**12}, "reach past"),
        ({"low": 10**6}, "malformed"),
        ({"freqs": [1, 2, 3]}, "sum|frequenc"),
        ({"name": 7}, "malformed"),
        ({"freqs": [2**70]}, "malformed"),
        ({"low": -20.5}, "malformed"),
    ],
)
def test_lies_in_the_table_are_refused(packed: bytes, change: dict[str, object], word: str) -> None:
    sections = unframe(packed, NUM_SECTIONS)
    header = json.loads(unsqueeze(sections[0], MAX_HEADER_BYTES))
    row = next(r for r in header["tensors"] if "freqs" in r)
    row.update(change)
    forged = frame([squeeze(json.dumps(header).encode()), *sections[1:]])
    with pytest.raises(ArtifactError, match=word):
        unpack(forged)


@pytest.mark.parametrize(
    ("key", "value"), [("num_layers", 10**9), ("context", 10**12), ("dim", 2**40), ("softcap", "x")]
)
def test_a_senseless_recipe_is_refused(packed: bytes, key: str, value: object) -> None:
    sections = unframe(packed, NUM_SECTIONS)
    header = json.loads(unsqueeze(sections[0], MAX_HEADER_BYTES))
    header["recipe"]["model"][key] = value
    with pytest.raises(ArtifactError, match=key):
        unpack(frame([squeeze(json.dumps(header).encode()), *sections[1:]]))


def test_an_empty_table_is_refused(packed: bytes) -> None:
    sections = unframe(packed, NUM_SECTIONS)
    header = json.loads(unsqueeze(sections[0], MAX_HEADER_BYTES)) | {"tensors": []}
    with pytest.raises(ArtifactError, match="no tensors"):
        unpack(frame([squeeze(json.dumps(header).encode()), *sections[1:]]))


def test_tensors_that_do_not_fit_the_recipe_are_refused(tiny_recipe: Recipe) -> None:
    artifact = artifact_of({"ints.a": np.ones((2, 2), np.float32)}, tiny_recipe)
    with pytest.raises(ArtifactError, match="do not fit its recipe"):
        build_predictor(artifact, torch.device("cpu"))
