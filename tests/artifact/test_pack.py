"""Packing: bit-exact, deterministic, short, and closed to what could not be read again."""

import base64
import hashlib
import lzma
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from every_scheme import SCHEMES, correct, draw_artifact, draw_factor, draw_tensor
from hypothesis import example, given, settings
from hypothesis import strategies as st

from underpar.artifact import pack as packing
from underpar.artifact.format import unframe
from underpar.artifact.pack import NUM_SECTIONS, Artifact, pack, shuffle, unpack, write_lines
from underpar.artifact.unpack import read_lines, unshuffle
from underpar.build.model import build_predictor
from underpar.errors import ArtifactError
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.schemes import QuantizedTensor, dequantize
from underpar.recipe import Recipe

# The model of PR 2014: matrices, gates, control vectors, scalars.
MATRICES = [(8192, 512), (512, 512), (256, 512), (2048, 512), (512, 2048)]
SMALL = [(8, 12), (512,), (2, 512), (8,), (8, 512), (11, 2, 2), (11, 2), (1, 12), (1,), ()]
CODED = [text for text in SCHEMES if text not in ("fp16", "ternary:4")]


def artifact_of(tensors: dict[str, QuantizedTensor]) -> Artifact:
    return Artifact(Recipe(), b"tokenizer", tensors)


def same_weights(a: Artifact, b: Artifact) -> bool:
    return all(
        np.array_equal(dequantize(t), dequantize(b.tensors[n])) for n, t in a.tensors.items()
    )


@settings(max_examples=15, deadline=None)
@example([(1, 1), (1, 1)], 2.5, 0)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=2),
    st.sampled_from([0.0, 0.3, 2.5, 40.0, math.inf]),
    st.integers(0, 2**31),
)
def test_round_trip_for_any_shape(shapes: list[tuple[int, int]], width: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = {}
    for i, shape in enumerate(shapes):
        schemes = [*CODED, "fp16", f"ternary:{shape[1]}", "ternary:1"]
        tensors |= {f"{i}.{text}": draw_tensor(text, shape, rng, width) for text in schemes}
        rank = min(*shape, 3)
        tensors |= {f"{i}.{t}.plus": correct(tensors[f"{i}.{t}"], rank, rng) for t in CODED[::3]}
    activations = {name: int(rng.integers(-512, 513)) for name in [*tensors][::2]}
    artifact = replace(artifact_of(tensors), activations=activations)
    data = pack(artifact)
    unpacked = unpack(data)
    assert unpacked.equals(artifact)
    assert artifact.equals(unpacked)
    assert same_weights(artifact, unpacked)
    assert pack(unpacked) == data


def draw_model(text: str, width: float) -> Artifact:
    """Every matrix of the model; halves of the embedding alone would take seconds to squeeze."""
    rng, shapes = np.random.default_rng(0), MATRICES[text == "fp16" :]
    return artifact_of({str(shape): draw_tensor(text, shape, rng, width) for shape in shapes})


@pytest.mark.parametrize("text", ["int6:12.85", "grid8"])
def test_round_trip_of_the_matrices_of_a_model(text: str) -> None:
    artifact = draw_model(text, 2.4)
    assert unpack(pack(artifact)).equals(artifact)


@pytest.mark.slow
@pytest.mark.parametrize("width", [0.0, 2.4, math.inf], ids=["zero", "gaussian", "largest"])
@pytest.mark.parametrize("text", SCHEMES)
def test_round_trip_of_the_matrices_in_every_scheme(text: str, width: float) -> None:
    artifact = draw_model(text, width)
    assert unpack(pack(artifact)).equals(artifact)


def test_round_trip_of_the_small_tensors_of_a_model() -> None:
    rng = np.random.default_rng(1)
    tensors = {
        f"{text} {shape}": draw_tensor(text, shape, rng)
        for shape in SMALL
        for text in ("fp16", "int8", "int8/1", "clip4", "int5:12")
        if shape or text == "fp16"
    }
    artifact = artifact_of(tensors)
    unpacked = unpack(pack(artifact))
    assert unpacked.equals(artifact)
    assert all(dequantize(t).shape == tensors[n].shape for n, t in unpacked.tensors.items())


def test_equal_artifacts_give_equal_bytes() -> None:
    one, other = draw_artifact(seed=4), draw_artifact(seed=4)
    # A mapping has no order; the file has that of its tensors.
    turned = dict(reversed(other.activations.items()))
    for inside in (True, False):
        assert (
            pack(one, inside)
            == pack(one, inside)
            == pack(replace(other, activations=turned), inside)
        )
    assert pack(one) != pack(draw_artifact(seed=5))


def changed(tensor: QuantizedTensor, what: str) -> QuantizedTensor:
    """The tensor with one number moved."""
    if what == "activation":
        return tensor
    if what.startswith("factor"):
        assert tensor.correction is not None
        left = tensor.correction.left
        parts = {"codes": left.codes.copy(), "steps": left.steps.copy()}
        parts[what.split()[1]].flat[0] += 1
        return replace(
            tensor, correction=LowRank(Factor(**parts, group=left.group), tensor.correction.right)
        )
    array = getattr(tensor, what).copy()
    array.flat[0] += 2
    return replace(tensor, **{what: array})


@pytest.mark.parametrize(
    "what",
    ["codes", "steps", "columns", "factor codes", "factor steps", "activation", "correction"],
)
def test_equality_and_the_file_see_one_number(what: str) -> None:
    artifact, name = draw_artifact(), "corrected.grid1"
    name = "plain.grid1+columns" if what == "columns" else name
    tensor, activations = artifact.tensors[name], dict(artifact.activations)
    tensor = replace(tensor, correction=None) if what == "correction" else changed(tensor, what)
    activations[name] += what == "activation"
    other = Artifact(
        artifact.recipe, artifact.tokenizer, artifact.tensors | {name: tensor}, activations
    )
    assert not artifact.equals(other)
    assert not other.equals(artifact)
    assert pack(artifact) != pack(other)


@pytest.mark.parametrize("text", ["int2", "int6", "gptq6:12.85", "gptq7:14+awq", "ternary:4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_that_a_scheme_does_not_have_are_refused(
    text: str, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = draw_tensor(text, (6, 8), np.random.default_rng(2))
    assert tensor.codes is not None
    if tensor.columns is not None:
        tensor.columns[:] = [0, 3, 0, 0, 0, -2, 0, 0]
        np.clip(tensor.codes, -63, 63, out=tensor.codes)
        tensor.codes[:, [1, 5]] = 127 * sign
        assert unpack(pack(artifact_of({"a": tensor}))).equals(artifact_of({"a": tensor}))
    tensor.codes[0, 0] = sign * (tensor.scheme.limit + 1)
    artifact = artifact_of({"a": tensor})
    with pytest.raises(ArtifactError, match="'a' has integers that"):
        pack(artifact)
    monkeypatch.setattr(packing, "check_codes", lambda *_: None)
    with pytest.raises(ArtifactError, match="'a' has integers that"):
        unpack(pack(artifact))


def test_what_could_not_be_read_is_not_packed() -> None:
    rng = np.random.default_rng(3)
    grid = draw_tensor("grid1", (6, 8), rng)
    wide = correct(grid, 7, rng)
    loose = replace(
        grid, correction=LowRank(draw_factor((6, 2), 12, rng), draw_factor((2, 8), 1, rng))
    )
    assert loose.correction is not None
    no_group = LowRank(replace(loose.correction.left, group=0), loose.correction.right)
    bad = {
        "7 for a whole number from 1 to 6": wide,
        "0 for a whole number from 1": replace(grid, correction=no_group),
        "a correction of ternary": replace(
            draw_tensor("ternary:4", (6, 8), rng), correction=loose.correction
        ),
        "log step 600": replace(grid, steps=np.full(6, 600, dtype=np.int16)),
    }
    for message, tensor in bad.items():
        with pytest.raises(ArtifactError, match=message):
            pack(artifact_of({"a": tensor}))
    good = artifact_of({"a": grid})
    with pytest.raises(ArtifactError, match="'b', which is no tensor"):
        pack(replace(good, activations={"b": 3}))
    with pytest.raises(ArtifactError, match="log step -513"):
        pack(replace(good, activations={"a": -513}))
    with pytest.raises(ArtifactError, match="no tensors"):
        pack(artifact_of({}))


@pytest.mark.parametrize("size", [0, 1, 2, 7, 100])
def test_shuffled_halves_come_back(size: int) -> None:
    numbers = np.random.default_rng(size).standard_normal(size).astype(np.float16)
    assert np.array_equal(unshuffle(shuffle(numbers)), numbers)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(-512, 512), max_size=200), min_size=1, max_size=5))
def test_lines_of_log_steps_come_back(lines: list[list[int]]) -> None:
    arrays = [np.array(line, dtype=np.int16) for line in lines]
    lengths = [len(line) for line in lines]
    data = write_lines(arrays)
    decoded = read_lines(data, lengths)
    assert [line.tolist() for line in decoded] == lines
    assert all(line.dtype == np.int16 for line in decoded)
    for wrong in (data[:-1], data + b"\0", data[2:]):
        if wrong != data:
            with pytest.raises(ArtifactError):
                read_lines(wrong, lengths)


def test_log_steps_cost_their_entropy() -> None:
    rng = np.random.default_rng(0)
    sizes, spreads = [512, 256, 2048, 512, 8192], [8, 3, 5, 1, 12]
    lines = [
        np.rint(rng.normal(-100, 20) + rng.normal(size=n) * s).astype(np.int16)
        for n, s in zip(sizes, spreads, strict=True)
    ]
    bits = sum(n * (np.log2(s) + 2.05) for n, s in zip(sizes, spreads, strict=True))
    size = len(write_lines(lines))
    assert size <= 1.02 * bits / 8
    raw = np.concatenate(lines).astype("<i2").view(np.uint8).reshape(-1, 2)
    planes = raw[:, 1].tobytes() + raw[:, 0].tobytes()
    assert size <= 0.96 * len(lzma.compress(planes, preset=9))


def test_widths_that_follow_log_steps_cost_little() -> None:
    # Weights of one deviation in all rows: how wide integers are follows from the steps alone.
    rng = np.random.default_rng(0)
    steps = np.rint(-80 + 8 * rng.standard_normal(2048)).astype(np.int16)
    weight = rng.standard_normal((2048, 64)) * 0.1
    codes = np.rint(weight / 2 ** (steps[:, None] / 16)).astype(np.int16)
    known = replace(draw_tensor("grid1", codes.shape, rng), steps=steps, codes=codes)
    sizes = []
    for tensor in (known, replace(known, steps=rng.permutation(steps))):
        sections = unframe(pack(artifact_of({"a": tensor})), NUM_SECTIONS)
        sizes.append(len(sections[4]))
    # Without them a row's index has about four bits.
    assert sizes[1] - sizes[0] >= 3 * 2048 / 8


def test_a_file_of_version_3_is_read_as_it_was_written() -> None:
    artifact = unpack(base64.b64decode(PINNED))
    digest = hashlib.sha256()
    for name, tensor in artifact.tensors.items():
        digest.update(name.encode() + dequantize(tensor).astype("<f4").tobytes())
    assert artifact.tokenizer == b"pinned"
    assert artifact.activations == {"grid": -17, "int": 40}
    assert digest.hexdigest() == PINNED_SHA256


def test_tensors_that_do_not_fit_the_recipe_are_refused(tiny_recipe: Recipe) -> None:
    tensors = {"a": draw_tensor("int6", (2, 2), np.random.default_rng(0))}
    with pytest.raises(ArtifactError, match="do not fit its recipe"):
        build_predictor(Artifact(tiny_recipe, b"", tensors), torch.device("cpu"))


# An empty recipe and five tensors, as packed by the first writer of version 3.
PINNED = (
    "VVBBUgMABgDYAgAAAAAAABlvNajfzfQRhkxb2wa74Oo0wt7BzjfSmqxnPFRkii6skgEAAAAAAAAKAAAAAAAAACQAAAAA"
    "AAAAZQAAAAAAAAA7AAAAAAAAABgAAAAAAAAA4ARrAYpdAD2IikaTyOUy/Pz9M5FSqzZlRlI03zJj+4faacD7faNAfVLr"
    "7Eq+2MS1ISvF9WMo3lw03A/MOijNbq+o08vEUujRy69nQqhsMHcD2xrN1+dT7qA2hu40jeR3ep/H/AlYBXrxuzGaygoj"
    "UxkQ6i3xSml87xQMUrhNk4DwJPg7yTa+A4qK/LOpSeUq3L4gllnRRGii83DDK+37+wAHTvDBYfS3PyVQGDbjcHmPC2WG"
    "NFQNdiSFYl6MKCL4Nxyl/dfxzg41tUehRNbkK0Y+GEZYcEddmF6s+R90RQkF13JWRYNmN8q14KXY8acnkll/hbuTP/mN"
    "KQPLg0iuvRGAMtN0Iaa4VI//NCkar+ZJ4pn309z52KEO4kIsRqH8AIusQMkd+/+V3sDjvOod0beFSHg4OC+bjMF5YFor"
    "e7rgJqOx2wU5fbfoLYSVtZca5wVDf91V3MB2Hrv05T+8BgbFlc9QHpTd+KKni1wx1gg2QSK4qQheBVrbpOazb7DU9Hht"
    "H9mNC8GRRVQ9NeDJQAAAAQAFcGlubmVkAAEAHzw0PD8+P0Q5OT07PDU9NkFDs1E168qXN+ixZCWTMMlJAPX/sf8LAJ3/"
    "rv+t/6L/CwAABgAAAAAAAAAFAAAAKgCmAQEAFAAXAOr/5P8dAAGASwD/f/4/BIDpC8Lo9H+3AL3/DuRXpOP+/394XjRk"
    "2SEDp0jdEeJQHDJnC9k0ZBUjWmKnJF0ec96lA2ID0SsFBgAAAAAAAAABAAAAKQA5CAEAmw98I0ESyyPK59ofAcPDn8QE"
    "orhZvNZEaulsoQQAAMCYOwIAMVA2BA3VbQUTWxooACAHActc9y4="
)
PINNED_SHA256 = "f17acf28500a93d454766b5eab2230db2e310fe85661f716567294c53624a1da"
