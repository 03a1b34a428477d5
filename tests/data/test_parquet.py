"""Parquet columns: every row is read in order, and every kind of bad file is refused by name."""

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from small_data import contents, decoded
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import load_data
from underpar.data.shards import REPAIRED
from underpar.data.sources.corpus import Document, Reading, read_documents
from underpar.data.sources.parquet import read_column
from underpar.errors import DataError


def write_parquet(path: Path, *, row_group_size: int = 1000, **columns: pyarrow.Array) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


def invalid_utf8(*values: bytes) -> pyarrow.Array:
    """A text column that holds these bytes, whatever they are."""
    raw = pyarrow.array(values, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())


def texts(path: Path, field: str = "text") -> list[bytes]:
    return list(read_column(path, field))


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_rows_come_in_order_over_batches_and_row_groups(
    tmp_path: Path, kind: pyarrow.DataType
) -> None:
    rows = [f"row {i} \u00e9\x00\U0001f600\n" for i in range(700)]
    path = write_parquet(
        tmp_path / "a.parquet",
        row_group_size=300,
        id=pyarrow.array(range(700)),
        text=pyarrow.array(rows, kind),
    )
    assert texts(path) == [row.encode() for row in rows]
    assert list(read_documents([path])) == [Document(row, "a.parquet") for row in rows]


def test_another_column_may_hold_the_text(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "a.parquet", text=pyarrow.array(["no"]), body=pyarrow.array(["yes"])
    )
    assert texts(path, "body") == [b"yes"]
    assert [d.text for d in read_documents([path], Reading(field="body"))] == ["yes"]


def test_a_null_is_an_empty_document(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=pyarrow.array(["a", None, "", "b"]))
    assert texts(path) == [b"a", b"", b"", b"b"]
    with pytest.raises(DataError, match=r"a\.parquet: document 2: empty document"):
        list(read_documents([path]))
    assert [d.text for d in read_documents([path], Reading(bad_input="repair"))] == ["a", "b"]


def test_invalid_utf8_is_refused_by_document(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=invalid_utf8(b"good", b"ba\xffd", b"x"))
    assert texts(path) == [b"good", b"ba\xffd", b"x"]
    with pytest.raises(DataError, match=r"a\.parquet: document 2: invalid UTF-8 at byte 3"):
        list(read_documents([path]))


def test_a_repaired_file_is_counted_and_flagged(tmp_path: Path) -> None:
    val = write_parquet(tmp_path / "val.parquet", text=pyarrow.array(["held out", None]))
    train = write_parquet(tmp_path / "a.parquet", text=invalid_utf8(b"good", b"b\xff\xfed", b"x"))
    options = BuildOptions(None, [val], kind="bytes", reading=Reading(bad_input="repair"))
    manifest = build_data([train], tmp_path / "out", options)
    data = load_data(tmp_path / "out")
    assert decoded(data, data.train) == [b"good", "b\ufffd\ufffdd".encode(), b"x"]
    assert data.train.flags.tolist() == [0, REPAIRED, 0]
    assert manifest["tally"] == {
        "documents": 5,
        "left_out_empty": 1,
        "repaired": 1,
        "replaced_characters": 2,
    }
    assert manifest["train"]["repaired"] == 1
    assert "manifest.json" in contents(tmp_path / "out")


def test_a_missing_column_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "a.parquet", content=pyarrow.array(["x"]), url=pyarrow.array(["y"])
    )
    with pytest.raises(DataError) as caught:
        texts(path)
    assert str(caught.value) == (
        f'{path}: no column "text", it has content, url; choose with --field'
    )


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pyarrow.array([1, 2]), "int64"),
        (pyarrow.array([b"bytes"]), "binary"),
        (pyarrow.array([["a list"]]), "list"),
        (pyarrow.array([None, None], pyarrow.null()), "null"),
    ],
)
def test_a_column_that_is_not_text_is_refused(
    tmp_path: Path, column: pyarrow.Array, kind: str
) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=column)
    with pytest.raises(DataError, match=rf'a\.parquet: column "text" holds {kind}.*, not text'):
        texts(path)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    rows = pyarrow.array([f"some text {i}" for i in range(1000)])
    path = write_parquet(tmp_path / "a.parquet", text=rows)
    data = path.read_bytes()
    for damaged in (b"", b"PAR1", data[:-9], data[: len(data) // 2], b"\0" * 500 + data[500:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.parquet: row \d+: cannot be read") as caught:
            texts(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"gone\.parquet: row 1: cannot be read"):
        texts(tmp_path / "gone.parquet")


def test_without_pyarrow_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs the package pyarrow \(pip install pyarrow\)"):
        texts(tmp_path / "a.parquet")
