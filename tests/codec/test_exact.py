"""Files in exact mode: any bytes come back on any machine, and other files are refused."""

import dataclasses
import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exact_networks import made_up
from lever_stacks import CPU
from tiny import TinyRun
from underpar.codec import exact
from underpar.codec.exact import cut, decode_exact, encode_exact, with_ends, without_ends
from underpar.codec.frame import EXACT, read_frame
from underpar.codec.stream import Codec
from underpar.core.runtime import Runtime
from underpar.errors import CodecError
from underpar.infer.exact_predictor import ExactPredictor
from underpar.stages.use import open_codec

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 8
FLAGS = [HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def codec(tiny_run: TinyRun, runtime: Runtime) -> Codec:
    plain = open_codec(tiny_run.folder.artifact_file, runtime)
    assert plain.open_exact is not None
    network = plain.open_exact()
    return dataclasses.replace(plain, open_exact=lambda: network)


@pytest.fixture(scope="module")
def compressed(codec: Codec) -> bytes:
    return codec.compress(TEXT.encode(), exact=True)


@settings(max_examples=8, deadline=None, suppress_health_check=FLAGS)
@given(st.lists(st.one_of(st.binary(max_size=20), st.just(TEXT.encode()[:90])), max_size=5))
def test_any_documents_come_back(codec: Codec, parts: list[bytes]) -> None:
    data = b"\0".join(parts)
    assert codec.decompress(codec.compress(data, exact=True)) == data
    assert codec.decompress(codec.compress(data, exact=True, separator=b"\0")) == data


def test_text_shrinks_and_the_file_names_no_machine(codec: Codec, compressed: bytes) -> None:
    header = read_frame(compressed).header
    assert (header.mode, header.machine) == (EXACT, "")
    assert len(compressed) < len(codec.compress(TEXT.encode())) + 8
    shares: list[float] = []
    assert codec.decompress(compressed, on_share=shares.append) == TEXT.encode()
    assert shares[-1] == 1.0


def test_another_instruction_set_decodes_it(
    tiny_run: TinyRun, compressed: bytes, tmp_path: Path
) -> None:
    source, out = tmp_path / "text.upz", tmp_path / "text"
    source.write_bytes(compressed)
    command = ["decompress", str(tiny_run.folder.artifact_file), str(source), str(out), "--json"]
    setting = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    environment = {**os.environ, **setting, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", "underpar", *command], env=environment, check=True)
    assert out.read_text() == TEXT


@pytest.mark.parametrize("options", [{"adapt": True}, {"indexed": True, "separator": b"x"}])
def test_what_exact_mode_does_not_cover_is_refused(codec: Codec, options: dict[str, bool]) -> None:
    with pytest.raises(CodecError, match="frozen network"):
        codec.compress(b"x", exact=True, **options)


def test_another_artifact_is_refused(codec: Codec, compressed: bytes) -> None:
    other = dataclasses.replace(codec, identity=hashlib.sha256(b"other").hexdigest())
    with pytest.raises(CodecError, match="artifact it was made with"):
        other.decompress(compressed)


def test_long_documents_are_cut_after_whole_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "CUT_TOKENS", 60)
    predictor = ExactPredictor(made_up("softcap"), CPU)
    documents = [np.arange(4, 4 + length) for length in (200, 5, 1, 80, 64, 0, 3)]
    sequences = with_ends(documents)
    streams = cut(predictor, sequences)
    assert np.array_equal(np.concatenate(streams), np.concatenate(sequences))
    assert len(streams) > 4 and max(map(len, streams)) <= 360 // len(streams) + 64
    payload, num_lanes = encode_exact(predictor, sequences)
    joined = decode_exact(predictor, payload, num_lanes, 360)
    assert all(map(np.array_equal, without_ends(joined), documents))
    with pytest.raises(CodecError, match="more text"):
        decode_exact(predictor, payload, num_lanes, 358)
    lengths = np.frombuffer(payload, "<u2", num_lanes, offset=1).copy()
    lengths[0] += 300
    forged = payload[:1] + lengths.tobytes() + payload[1 + 2 * num_lanes :]
    for wrong in (forged, b"", b"\7" + payload[1:]):
        with pytest.raises(CodecError, match="damaged"):
            decode_exact(predictor, wrong, num_lanes, 999)
    with pytest.raises(CodecError, match="damaged"):
        decode_exact(predictor, payload, exact.MAX_LANES + 1, 999)
    with pytest.raises(CodecError, match="no end"):
        without_ends(joined[:-1])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 9))
def test_the_longest_lane_is_as_short_as_it_can_be(sizes: list[int], most_lanes: int) -> None:
    predictor = ExactPredictor(made_up("softcap"), CPU)
    sequences = [np.full(size, 4 + i) for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "CUT_TOKENS", 32)
        patch.setattr(exact, "MAX_LANES", most_lanes)
        streams = cut(predictor, sequences)
    assert np.array_equal(np.concatenate(streams), np.concatenate(sequences))
    parts = [min(32, size - i) for size in sizes for i in range(0, size, 32)]
    num_lanes = min(most_lanes, max(1, sum(sizes) // 32))
    # All ways to cut the parts into so many lanes.
    ways = itertools.combinations(range(1, len(parts)), min(num_lanes, len(parts)) - 1)
    bounds = ([0, *way, len(parts)] for way in ways)
    best = min(max(sum(parts[a:b]) for a, b in itertools.pairwise(way)) for way in bounds)
    assert (len(streams) <= num_lanes, max(map(len, streams))) == (True, best)


def test_lanes_follow_the_memory_of_decoder_and_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = ExactPredictor(made_up("softcap"), CPU)
    documents = with_ends([np.arange(4, 34)] * 400)
    lane = predictor.lane_bytes(predictor.context)
    assert len(cut(predictor, documents)) == 400 * 31 // exact.CUT_TOKENS
    for lanes in (1, 4, 7):
        assert len(cut(predictor, documents, (lanes + 0.5) * lane)) == lanes
    for lanes in (1, 4, 7):
        monkeypatch.setattr(exact, "free_memory_bytes", lambda _, n=lanes: (n + 0.5) * lane / 0.6)
        assert len(cut(predictor, documents)) == lanes


def test_too_little_memory_is_refused_with_the_need(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = ExactPredictor(made_up("softcap"), CPU)
    payload, num_lanes = encode_exact(predictor, [np.arange(4, 400)] * 8)
    monkeypatch.setattr(predictor, "lane_bytes", lambda length: 4e9)
    monkeypatch.setattr(exact, "free_memory_bytes", lambda _: 7.5e9)
    with pytest.raises(CodecError, match=r"3 lanes .* 12\.0 GB of memory, 7\.5 GB are free"):
        decode_exact(predictor, payload, num_lanes, 9999)
