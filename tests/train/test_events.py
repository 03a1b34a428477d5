"""Event files, parsed back by hand and by TensorBoard where it is installed."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.train.events import EventWriter, crc32c, frame, masked_crc

Fields = list[tuple[int, int | bytes]]


def records(data: bytes) -> Iterator[bytes]:
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked_crc(data[:8])
        body, check = data[12 : 12 + length], data[12 + length : 16 + length]
        assert struct.unpack("<I", check)[0] == masked_crc(body)
        yield body
        data = data[16 + length :]


def read_varint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    while True:
        byte, data = data[0], data[1:]
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, data


def fields(data: bytes) -> Fields:
    """(number, value) of a protocol buffer: varints as int, all else as bytes."""
    points: Fields = []
    while data:
        key, data = read_varint(data)
        wire = key & 7
        if wire == 0:
            value, data = read_varint(data)
            points.append((key >> 3, value))
            continue
        length, data = read_varint(data) if wire == 2 else ({1: 8, 5: 4}[wire], data)
        points.append((key >> 3, data[:length]))
        data = data[length:]
    return points


def scalars(path: Path | None) -> list[tuple[int, dict[str, float]]]:
    """Step and values of each summary."""
    assert path is not None
    points = []
    for record in records(path.read_bytes()):
        event = dict(fields(record))
        if 5 not in event:
            continue
        values = {}
        for number, value in fields(event[5]):  # type: ignore[arg-type]
            assert number == 1
            parts = dict(fields(value))  # type: ignore[arg-type]
            (values[parts[1].decode()],) = struct.unpack("<f", parts[2])  # type: ignore
        points.append((event[2], values))
    return points  # type: ignore[return-value]


def test_crc_of_the_published_examples() -> None:
    # RFC 3720, appendix B.4.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def test_a_record_as_tensorflow_writes_it() -> None:
    # The masked CRC of a length of 24 that begins many event files.
    assert frame(bytes(24))[:12].hex() == "1800000000000000a37f4b22"


def test_a_file_begins_with_its_version_and_its_start(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    assert list(tmp_path.iterdir()) == []
    writer.write(41, {"loss": 3.0})
    assert writer.path is not None
    first, second, _ = (dict(fields(r)) for r in records(writer.path.read_bytes()))
    assert first[3] == b"brain.Event:2"
    assert struct.unpack("<d", first[1])[0] > 1.5e9  # type: ignore[arg-type]
    assert (second[2], second[7]) == (41, b"\x08\x01")
    assert "tfevents" in writer.path.name


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**40),
            st.dictionaries(st.text(max_size=200), st.floats(width=32, allow_nan=False)),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[int, dict[str, float]]]
) -> None:
    writer = EventWriter(tmp_path_factory.mktemp("events"))
    for step, values in lines:
        writer.write(step, values)
    assert scalars(writer.path) == lines


def test_only_numbers_are_written(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.write(1, {"step": 1, "loss": math.nan, "why": "text", "phases": {}})
    ((step, values),) = scalars(writer.path)
    assert (step, set(values)) == (1, {"step", "loss"})
    assert math.isnan(values["loss"])


def test_each_start_has_a_later_file(tmp_path: Path) -> None:
    writers = [EventWriter(tmp_path) for _ in range(2)]
    writers[0].write(1, {"loss": 3.0})
    writers[1].write(5, {"loss": 2.0})
    assert sorted(tmp_path.iterdir()) == [w.path for w in writers]
    assert [scalars(w.path) for w in writers] == [[(1, {"loss": 3.0})], [(5, {"loss": 2.0})]]


def test_tensorboard_reads_a_resumed_run(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, stop in ((1, 8), (5, 11)):
        writer = EventWriter(tmp_path)
        for step in range(start, stop):
            writer.write(step, {"loss": step + start / 100})
    scalars = loading.EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    wanted = [(s, s + (0.01 if s < 5 else 0.05)) for s in range(1, 11)]
    assert [(e.step, e.value) for e in scalars] == [(s, pytest.approx(v)) for s, v in wanted]
