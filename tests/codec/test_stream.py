"""The codec: any bytes come back; damage, strangers and other machines are refused."""

import dataclasses
import hashlib
import os
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiny import TinyRun
from tiny_codec import Unigram
from trained import TRANSFORM_NAMES, any_bytes, lossless
from underpar.codec import range_coder, stream
from underpar.codec.frame import ADAPTED, EXACT, PLAIN, STORED, Frame, Header, read_frame
from underpar.codec.lanes import (
    Bound,
    decode_documents,
    encode_documents,
    frequencies,
    probabilities,
    quantize_there,
)
from underpar.codec.stream import Codec, code_documents
from underpar.core.runtime import Runtime
from underpar.data.folder import load_data
from underpar.errors import CodecError
from underpar.seams import BOS_ID
from underpar.stages.use import open_codec

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 8


@pytest.fixture(scope="module")
def codec(tiny_run: TinyRun, runtime: Runtime) -> Codec:
    return open_codec(tiny_run.folder.artifact_file, runtime)


@pytest.fixture(scope="module")
def compressed(codec: Codec) -> bytes:
    return codec.compress(TEXT.encode())


def restated(compressed: bytes, **changes: Any) -> bytes:
    """The file with another header, and right checksums."""
    parts = read_frame(compressed)
    header = dataclasses.replace(parts.header, **changes)
    return dataclasses.replace(parts, header=header).to_bytes()


def non_english(num_bytes: int) -> bytes:
    """Text in five scripts that the tokenizer has never seen."""
    rng = np.random.default_rng(0)
    blocks = (0x0400, 0x0590, 0x0900, 0x3040, 0x4E00)
    words = []
    while sum(map(len, words)) < num_bytes:
        block = blocks[rng.integers(len(blocks))]
        letters = rng.integers(block, block + 60, rng.integers(2, 9))
        words.append("".join(map(chr, letters)))
    return " ".join(words).encode()[:num_bytes]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        st.binary(max_size=80), st.text(max_size=60).map(lambda s: s.encode("utf-8", "replace"))
    )
)
def test_any_bytes_come_back(codec: Codec, data: bytes) -> None:
    assert codec.decompress(codec.compress(data)) == data


@pytest.mark.parametrize("data", [b"", b"\x00", os.urandom(300), b"\xff\xfe" * 50, TEXT.encode()])
def test_edges_come_back(codec: Codec, data: bytes) -> None:
    assert codec.decompress(codec.compress(data)) == data


def test_64_kb_of_non_english_text(codec: Codec) -> None:
    data = non_english(65_536)
    assert len(data) == 65_536
    assert codec.decompress(codec.compress(data)) == data


@pytest.mark.slow
def test_1_mb_of_non_english_text(codec: Codec) -> None:
    data = non_english(1_000_000)
    assert codec.decompress(codec.compress(data)) == data


def test_text_shrinks_and_noise_is_stored(codec: Codec, compressed: bytes) -> None:
    parts = read_frame(compressed)
    assert parts.header.mode == PLAIN
    assert len(parts.payload) < 0.6 * len(TEXT)
    noise = os.urandom(500)
    parts = read_frame(codec.compress(noise))
    assert (parts.header.mode, parts.payload) == (STORED, noise)


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 7])
def test_any_number_of_lanes_and_documents(codec: Codec, num_lanes: int) -> None:
    documents = [codec.tokenizer.encode(TEXT[:n].encode()) for n in (30, 1, 200, 5, 77)]
    documents.append(np.empty(0, dtype=np.int64))
    payload = encode_documents(codec.predictor, documents, num_lanes)
    decoded = decode_documents(codec.predictor, payload, len(documents), num_lanes, Bound(10_000))
    assert decoded == [d.tolist() for d in documents]


def test_coded_bits_are_scored_bits(codec: Codec, tiny_run: TinyRun) -> None:
    shard = load_data(tiny_run.data).val
    documents = [np.array(shard.doc(i), dtype=np.int64) for i in range(shard.num_documents)]
    from underpar.data.batch import pack_documents

    batch, _ = pack_documents(documents, 1, codec.predictor.context)
    scored = float(codec.predictor.nll(batch).double().sum()) / np.log(2)
    assert code_documents(codec, documents) == pytest.approx(scored, rel=0.001)


@pytest.mark.parametrize("place", [0, 4, 6, 14, 20, 30, 36, 45, -1, -20])
def test_a_flipped_bit_is_refused(codec: Codec, compressed: bytes, place: int) -> None:
    damaged = bytearray(compressed)
    damaged[place] ^= 4
    with pytest.raises(CodecError):
        codec.decompress(bytes(damaged))


@settings(max_examples=100, deadline=None)
@given(
    mode=st.sampled_from([PLAIN, ADAPTED, EXACT]),
    parts=st.tuples(*[st.binary(max_size=40)] * 3),
    texts=st.tuples(*[st.text("abc: 0", max_size=255)] * 2),
    verified=st.booleans(),
)
def test_a_frame_comes_back(
    mode: int, parts: tuple[bytes, bytes, bytes], texts: tuple[str, str], verified: bool
) -> None:
    payload, index, separator = parts
    header = Header(mode, bytes(8), 3, 1, 7, bytes(8), *texts, separator)
    written = Frame(header, payload, index, verified)
    raw = written.to_bytes()
    assert read_frame(raw) == written
    for other in (raw + b"\0", raw + raw, raw[:-1], raw[1:]):
        with pytest.raises(CodecError):
            read_frame(other)


@pytest.mark.parametrize("keep", [0, 10, 40, -3])
def test_a_cut_file_is_refused(codec: Codec, compressed: bytes, keep: int) -> None:
    with pytest.raises(CodecError):
        codec.decompress(compressed[:keep])


def test_a_damaged_stored_file_is_refused(codec: Codec) -> None:
    parts = read_frame(codec.compress(os.urandom(100)))
    other = dataclasses.replace(parts, payload=parts.payload[:-1] + bytes([parts.payload[-1] ^ 1]))
    with pytest.raises(CodecError, match="differs from the original"):
        codec.decompress(other.to_bytes())


def test_a_foreign_file_is_refused(codec: Codec) -> None:
    with pytest.raises(CodecError, match="wrong magic"):
        codec.decompress(b"\x89PNG" + bytes(100))


def test_another_artifact_is_refused(codec: Codec, compressed: bytes) -> None:
    other = dataclasses.replace(codec, identity=hashlib.sha256(b"other").hexdigest())
    with pytest.raises(CodecError, match="artifact it was made with"):
        other.decompress(compressed)


def test_another_machine_is_refused_but_may_try(
    codec: Codec, compressed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "fingerprint", lambda predictor: "torch 9.9 elsewhere")
    with pytest.raises(CodecError, match=r"torch 9\.9 elsewhere.*--any-machine"):
        codec.decompress(compressed)
    assert codec.decompress(compressed, any_machine=True) == TEXT.encode()


def test_other_floats_are_another_machine(codec: Codec, compressed: bytes) -> None:
    here = stream.fingerprint(codec.predictor)
    assert here == stream.fingerprint(codec.predictor) == read_frame(compressed).header.machine
    assert re.search(r" threads 1 step [0-9a-f]{8}$", here)
    # A weight stands for a sum that another processor rounds otherwise.
    embedding = codec.predictor.model.embedding.weight
    before = embedding.detach().clone()
    with torch.no_grad():
        embedding[BOS_ID, 0] += 1e-5
    try:
        assert stream.fingerprint(codec.predictor) != here
        with pytest.raises(CodecError, match="floats may differ"):
            codec.decompress(compressed)
    finally:
        with torch.no_grad():
            embedding.copy_(before)


def test_a_file_of_an_earlier_version_is_refused(codec: Codec, compressed: bytes) -> None:
    machine = read_frame(compressed).header.machine.partition(" threads")[0]
    with pytest.raises(CodecError, match="--any-machine"):
        codec.decompress(restated(compressed, machine=machine))
    with pytest.raises(CodecError, match="earlier version"):
        codec.decompress(b"UPZ1" + compressed[4:])


def test_an_encoder_that_cannot_decode_does_not_report_success(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Codec, "_checked", lambda self, header, raw: b"something else")
    with pytest.raises(CodecError, match="nothing was written"):
        codec.compress(TEXT.encode())


def test_a_header_that_claims_too_little_text_is_refused(codec: Codec, compressed: bytes) -> None:
    with pytest.raises(CodecError, match="more text than its header"):
        codec.decompress(restated(compressed, num_bytes=3))


def test_a_header_that_claims_many_documents_is_refused(codec: Codec, compressed: bytes) -> None:
    lies: list[dict[str, Any]] = [{"num_bytes": 2**40}, {"num_lanes": 60_000}, {"mode": 9}]
    lies += [{"num_documents": 2**20, "num_bytes": 2**20, "separator": b"ab"}, {"mode": STORED}]
    for lie in lies:
        with pytest.raises(CodecError, match="makes no sense"):
            codec.decompress(restated(compressed, **lie))


def test_probabilities_of_a_step_are_whole(codec: Codec) -> None:
    log_probs = codec.predictor.stepper(3).step(torch.tensor([1, 1, 1]))
    np.testing.assert_allclose(probabilities(log_probs).sum(dim=1), 1.0, rtol=1e-12)


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 300.0])
def test_a_device_quantizes_as_the_host_does(spread: float) -> None:
    log_probs = torch.log_softmax(spread * torch.randn(5, 300), dim=1)
    probs = probabilities(log_probs)
    assert np.array_equal(quantize_there(probs).numpy(), range_coder.quantize(probs.numpy()))
    assert np.array_equal(frequencies(log_probs), range_coder.quantize(probs.numpy()))
    with pytest.raises(CodecError, match="not finite"):
        quantize_there(torch.full((2, 9), torch.nan, dtype=torch.float64))


def test_the_number_of_threads_does_not_matter(codec: Codec, compressed: bytes) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert codec.compress(TEXT.encode()) == compressed
        assert codec.decompress(compressed) == TEXT.encode()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def transformed(name: str, text: str = TEXT) -> Codec:
    tokenizer = lossless(name)
    return Codec(Unigram(tokenizer, text.encode()), tokenizer, hashlib.sha256(b"").hexdigest())


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
@settings(max_examples=20, deadline=None)
@given(data=any_bytes)
def test_any_bytes_come_back_behind_a_transform(name: str, data: bytes) -> None:
    # Seen often, so that they are coded and not stored.
    codec = transformed(name, data.decode("utf-8", "ignore"))
    assert codec.decompress(codec.compress(data * 5)) == data * 5


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
def test_a_text_may_have_more_tokens_than_bytes(name: str) -> None:
    text = "A B C D E F G H " * 20
    codec = transformed(name, text)
    compressed = codec.compress(text.encode())
    assert read_frame(compressed).header.mode == PLAIN
    assert codec.decompress(compressed) == text.encode()


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
def test_lanes_may_end_between_an_operator_and_its_word(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "TOKENS_PER_LANE", 3)
    text = "The NASA \u00c9 iPhone Of McDonald's " * 8
    codec = transformed(name, text)
    compressed = codec.compress(text.encode())
    header = read_frame(compressed).header
    assert (header.mode, header.num_documents) == (PLAIN, 64)
    assert codec.decompress(compressed) == text.encode()


def test_a_payload_of_impossible_operators_is_refused() -> None:
    codec = transformed("caseops", "A " * 300)
    header = read_frame(codec.compress(b"A " * 300)).header
    payload = encode_documents(codec.predictor, [np.array([4, 4, 4])], 1)
    with pytest.raises(CodecError, match="the file is damaged: case operator"):
        codec.decompress(Frame(header, payload).to_bytes())
