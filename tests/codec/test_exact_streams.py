"""Streams in exact mode: any ragged set of lanes comes back, and damage ends in a typed error."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exact_networks import made_up
from lever_stacks import CPU
from underpar.codec.exact_streams import decode_streams, encode_streams
from underpar.errors import CodecError
from underpar.infer.exact_predictor import ExactPredictor
from underpar.seams import BOS_ID

LENGTHS = [70, 3, 1, 33, 33, 12, 5, 2, 40, 9, 64]


@pytest.fixture(scope="module")
def predictor() -> ExactPredictor:
    return ExactPredictor(made_up("bigram", "smear", "loop"), CPU)


def streams_of(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Random tokens, in some of which documents end."""
    rng = np.random.default_rng(seed)
    streams = [rng.integers(4, 500, length) for length in lengths]
    for stream in streams[::2]:
        stream[rng.integers(len(stream), size=2)] = BOS_ID
    return streams


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 45), min_size=1, max_size=20), st.integers(0, 99))
def test_streams_come_back(predictor: ExactPredictor, lengths: list[int], seed: int) -> None:
    streams = streams_of(lengths, seed)
    payload, bits = encode_streams(predictor, streams)
    back = decode_streams(predictor, payload, lengths)
    assert all(np.array_equal(a, b) for a, b in zip(streams, back, strict=True))
    # A coder has a state of eight bytes, of which three are price, and no word is half empty.
    num_coders = -(-len(lengths) // 8)
    assert bits / 8 <= len(payload) <= bits / 8 + 9 * num_coders


def test_bits_do_not_depend_on_the_other_streams(predictor: ExactPredictor) -> None:
    streams = streams_of(LENGTHS)
    _, bits = encode_streams(predictor, streams)
    assert bits == pytest.approx(sum(encode_streams(predictor, [s])[1] for s in streams), rel=1e-12)


@pytest.mark.parametrize("place", [0, 7, 12, -1, -30])
def test_a_flipped_bit_is_found(predictor: ExactPredictor, place: int) -> None:
    streams = streams_of(LENGTHS)
    damaged = bytearray(encode_streams(predictor, streams)[0])
    damaged[place] ^= 16
    with pytest.raises(CodecError, match="damaged"):
        decode_streams(predictor, bytes(damaged), LENGTHS)


@pytest.mark.parametrize("change", [b"", b"\0", b"\0\0\0\0"])
def test_cut_and_continued_payloads_are_found(predictor: ExactPredictor, change: bytes) -> None:
    payload, _ = encode_streams(predictor, streams_of(LENGTHS))
    with pytest.raises(CodecError, match="damaged"):
        decode_streams(predictor, payload + change if change else payload[:-4], LENGTHS)
    with pytest.raises(CodecError, match="damaged"):
        decode_streams(predictor, payload[:15], LENGTHS)


def test_other_lengths_are_found(predictor: ExactPredictor) -> None:
    payload, _ = encode_streams(predictor, streams_of(LENGTHS))
    for other in ([*LENGTHS[:-1], 63], LENGTHS[:-1]):
        with pytest.raises(CodecError, match="damaged"):
            decode_streams(predictor, payload, other)


@pytest.mark.gpu
def test_what_one_device_encodes_the_other_decodes(predictor: ExactPredictor) -> None:
    on_gpu = ExactPredictor(made_up("bigram", "smear", "loop"), torch.device("cuda"))
    lengths = [150, *LENGTHS]
    streams = streams_of(lengths)
    payload, _ = encode_streams(predictor, streams)
    assert encode_streams(on_gpu, streams)[0] == payload
    for other in (predictor, on_gpu):
        back = decode_streams(other, payload, lengths)
        assert all(np.array_equal(a, b) for a, b in zip(streams, back, strict=True))
