"""Published token files: what is stored is read, every kind of damage is refused by name."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from underpar.data.published import files as published
from underpar.data.published.files import (
    KNOWN_VAL,
    check_known_val,
    open_published,
    open_sidecar,
    refuse_special_ids,
    sidecar_of,
    split_files,
)
from underpar.data.value_files import open_values
from underpar.errors import DataError

VOCAB_SIZE = 300
TOKENS = [1, 5, 6, 7, 1, 299, 1, 1, 4, 4]
SOURCE_BYTES = [0, 3, 1, 2, 0, 65_535, 0, 0, 1, 1]


def write_raw(path: Path, values: Sequence[int] | npt.NDArray[np.uint16]) -> Path:
    # Laid out here by hand, so that reader and writer are not checked against each other alone.
    header = struct.pack("<256i", 20240520, 1, len(values), *[0] * 253)
    path.write_bytes(header + np.asarray(values, dtype="<u2").tobytes())
    return path


def damage(path: Path, offset: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(new)] = new
    path.write_bytes(data)


@contextmanager
def refused(message: str) -> Iterator[pytest.ExceptionInfo[DataError]]:
    with pytest.raises(DataError, match=message) as caught:
        yield caught
    assert "\n" not in str(caught.value)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return write_raw(tmp_path / "fineweb_val_000000.bin", TOKENS)


@pytest.mark.parametrize("num_values", [0, 1, 100_000])
def test_stored_values_are_read(tmp_path: Path, num_values: int) -> None:
    stored = np.random.default_rng(0).integers(0, VOCAB_SIZE, num_values).astype(np.uint16)
    path = write_raw(tmp_path / "a.bin", stored)
    assert path.stat().st_size == 1024 + 2 * num_values
    values = open_published(path, VOCAB_SIZE)
    assert values.dtype == np.uint16 and not values.flags.writeable
    assert np.array_equal(values, stored)


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, struct.pack("<i", 20240521), "magic is 20240521, expected 20240520"),
        (4, struct.pack("<i", 2), "version 2, expected 1"),
        (12, struct.pack("<i", 9), "header integer 3 is 9, expected 0"),
        (1020, struct.pack("<i", -1), "header integer 255 is -1, expected 0"),
        (8, struct.pack("<i", 11), "file has 1044 bytes, its header promises 1046"),
        (8, struct.pack("<i", 9), "file has 1044 bytes, its header promises 1042"),
        (8, struct.pack("<i", 2**31 - 1), "its header promises 4294968318"),
        (8, struct.pack("<i", -10), "header promises -10 values"),
        (1034, struct.pack("<H", 300), "token 5 is id 300, the tokenizer has 300 ids"),
    ],
)
def test_damage_is_refused_by_name(token_file: Path, offset: int, new: bytes, message: str) -> None:
    damage(token_file, offset, new)
    with refused(message) as caught:
        open_published(token_file, VOCAB_SIZE)
    assert str(token_file) in str(caught.value)


@pytest.mark.parametrize("num_bytes", [0, 3, 1023, 1024, 1043])
def test_a_file_cut_short_is_refused(token_file: Path, num_bytes: int) -> None:
    token_file.write_bytes(token_file.read_bytes()[:num_bytes])
    with refused(rf"fineweb_val_000000\.bin: .*{num_bytes} bytes"):
        open_published(token_file, VOCAB_SIZE)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with refused(r"gone\.bin: token file cannot be read: No such file"):
        open_values(tmp_path / "gone.bin")
    with refused("token file cannot be read: Is a directory"):
        open_values(tmp_path)


def test_the_first_wrong_value_is_named_in_any_chunk(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "CHUNK_VALUES", 3)
    assert open_published(token_file, VOCAB_SIZE).tolist() == TOKENS
    for limit, position in ((299, 5), (6, 2), (1, 0)):
        with refused(f"token {position} is id {TOKENS[position]}, the tokenizer has {limit}"):
            open_published(token_file, limit)
    damage(token_file, 1024 + 2 * 9, b"\x03\x00")
    with refused("token 9 is UNK"):
        refuse_special_ids(token_file, open_published(token_file, VOCAB_SIZE))


def test_only_a_limit_refuses_values(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [0, 65_535])
    assert open_values(path).tolist() == [0, 65_535]
    assert open_published(path, 65_536).tolist() == [0, 65_535]
    with refused("token 1 is id 65535"):
        open_published(path, 65_535)


@pytest.mark.parametrize(("token", "name"), [(0, "PAD"), (2, "EOS"), (3, "UNK")])
def test_special_ids_in_a_stream_are_refused(token: int, name: str) -> None:
    refuse_special_ids(Path("a.bin"), np.array([1, 4, 1], dtype=np.uint16))
    with refused(rf"a\.bin: token 2 is {name}"):
        refuse_special_ids(Path("a.bin"), np.array([1, 4, token, 3], dtype=np.uint16))


def test_a_split_is_its_token_files_without_sidecars(tmp_path: Path) -> None:
    names = [f"fineweb_val_{i:06d}.bin" for i in range(12)]
    for name in reversed(names):
        write_raw(tmp_path / name, TOKENS)
        write_raw(sidecar_of(tmp_path / name), SOURCE_BYTES)
    write_raw(tmp_path / "fineweb_train_000000.bin", TOKENS)
    assert [file.name for file in split_files(tmp_path, "val")] == names
    assert [file.name for file in split_files(tmp_path, "train")] == ["fineweb_train_000000.bin"]
    # The pattern of the published readers would have read the sidecars as tokens.
    assert len(list(tmp_path.glob("fineweb_val_*.bin"))) == 24


def test_a_gap_or_a_stray_name_is_refused(tmp_path: Path) -> None:
    with refused(r"fineweb_val_000000\.bin is missing"):
        split_files(tmp_path, "val")
    with refused("split is 'test', expected one of train, val"):
        split_files(tmp_path, "test")
    write_raw(tmp_path / "fineweb_val_000000.bin", TOKENS)
    write_raw(tmp_path / "fineweb_val_000002.bin", TOKENS)
    with refused(r"fineweb_val_000001\.bin is missing"):
        split_files(tmp_path, "val")
    write_raw(tmp_path / "fineweb_val_1.bin", TOKENS)
    with refused(r"fineweb_val_1\.bin: name is not fineweb_val_ and six digits"):
        split_files(tmp_path, "val")


def test_a_sidecar_gives_the_bytes_of_its_tokens(token_file: Path) -> None:
    tokens = open_published(token_file, VOCAB_SIZE)
    assert open_sidecar(token_file, tokens) is None
    write_raw(token_file.with_name("fineweb_val_bytes_000000.bin"), SOURCE_BYTES)
    source_bytes = open_sidecar(token_file, tokens)
    assert source_bytes is not None and source_bytes.tolist() == SOURCE_BYTES


def test_a_sidecar_that_does_not_fit_is_refused(token_file: Path) -> None:
    tokens = open_published(token_file, VOCAB_SIZE)
    path = sidecar_of(token_file)
    for entries in (SOURCE_BYTES[:-1], [*SOURCE_BYTES, 1]):
        write_raw(path, entries)
        with refused(rf"{path.name}: {len(entries)} entries for 10 tokens"):
            open_sidecar(token_file, tokens)
    write_raw(path, [*SOURCE_BYTES[:6], 2, 3, 1, 1])
    with refused("the BOS at token 6 has 2 bytes, expected 0"):
        open_sidecar(token_file, tokens)
    path.unlink()
    path.symlink_to("nowhere")
    with refused("cannot be read"):
        open_sidecar(token_file, tokens)


@pytest.mark.parametrize("name", ["fineweb_val_bytes_000000.bin", "val.bin", "fineweb_val_0.bin"])
def test_only_a_token_file_has_a_sidecar(name: str) -> None:
    sidecar = sidecar_of(Path("a/fineweb_train_000012.bin"))
    assert sidecar == Path("a/fineweb_train_bytes_000012.bin")
    with refused("not the name of a token file"):
        sidecar_of(Path(name))


def test_known_validation_sets_are_accepted() -> None:
    num_tokens = {
        "sp1024": 62_021_846,
        "sp8192": 40_540_803,
        "caseops": 47_853_344,
        "byte260": 151_130_645,
    }
    assert num_tokens.keys() == KNOWN_VAL.keys()
    for name, tokens in num_tokens.items():
        check_known_val(name, tokens, KNOWN_VAL[name][1])
    # One token a byte and one BOS for each of 50,000 documents.
    assert num_tokens["byte260"] - 50_000 == KNOWN_VAL["byte260"][1]


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_bytes", "message"),
    [
        ("caseops", 9_662_502, 32_756_252, "9,662,502 tokens, .* 47,853,344: .* partial"),
        ("sp1024", 62_021_845, 151_080_891, "62,021,845 tokens, .* 62,021,846: .* partial"),
        ("sp1024", 63_779_841, 155_769_746, "63,779,841 tokens, .*another export"),
        ("sp8192", 40_540_803, 176_332_748, "176,332,748 bytes, .* 151,080,891"),
        ("caseops", 47_853_344, 151_074_499, "151,074,499 bytes, .* 151,080,645: .*partial"),
        ("sp512", 1, 1, "no published validation set 'sp512'; known: sp1024, sp8192"),
    ],
)
def test_another_validation_set_is_refused(
    name: str, num_tokens: int, num_bytes: int, message: str
) -> None:
    with refused(message):
        check_known_val(name, num_tokens, num_bytes)
