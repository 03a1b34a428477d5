"""Reading documents, their hashes, every refusal and every repair."""

import gzip
import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from underpar.data.sources import corpus
from underpar.data.sources.corpus import (
    Document,
    Reading,
    Tally,
    demo_corpus,
    document_hash,
    is_held_out,
    list_inputs,
    parse,
    read_documents,
    read_raw,
)
from underpar.errors import DataError

PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def read(*paths: Path) -> list[Document]:
    return list(read_documents(paths))


def repair(path: Path, field: str = "text") -> tuple[list[Document], Tally]:
    tally = Tally()
    documents = []
    for batch in read_raw(path, field):
        documents += parse(batch, Reading(field, "repair"), tally)
    return documents, tally


@pytest.mark.parametrize("packing", PACKINGS)
def test_reads_text_and_json_lines_in_every_packing(tmp_path: Path, packing: str) -> None:
    text = "line\r\n  caf\u00e9 \u2581\n\n"
    lines = [{"text": "one\n", "source": "web"}, {"text": " \u00bd ", "id": 7}]
    body = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    pack = PACKINGS[packing]
    whole = write(tmp_path / f"a.txt{packing}", pack(text.encode()))
    many = write(tmp_path / f"b.jsonl{packing}", pack(body.encode()))
    assert read(whole, many) == [
        Document(text, f"a.txt{packing}"),
        Document("one\n", "web"),
        Document(" \u00bd ", f"b.jsonl{packing}"),
    ]


def test_several_frames_or_streams_are_read_through(tmp_path: Path) -> None:
    for packing, pack in PACKINGS.items():
        data = b"".join(pack(line) for line in (b'{"text": "a"}\n', b'{"text": "b"}'))
        path = write(tmp_path / f"two.jsonl{packing}", data)
        assert [document.text for document in read(path)] == ["a", "b"]


def test_a_folder_is_read_in_sorted_order_and_skips_other_files(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"second")
    write(tmp_path / "a" / "z.jsonl", b'{"text": "first"}')
    write(tmp_path / "c.md", b"third")
    write(tmp_path / "D.TXT", b"zeroth")
    others = {
        "photo.png": ".png",
        "table.csv": ".csv",
        ".git/HEAD": "hidden",
        ".notes.txt": "hidden",
        "binary": "without an ending",
        "empty": "without an ending",
    }
    for name in others:
        write(tmp_path / name, {"empty": b"", "binary": b"a\0b"}.get(name, b"words"))
    assert [document.text for document in read(tmp_path)] == [
        *("zeroth", "first", "second", "third")
    ]
    inputs = list_inputs([tmp_path])
    assert inputs.files[0] == tmp_path / "D.TXT"
    assert inputs.files[1:] == [tmp_path / "a" / "z.jsonl", tmp_path / "b.txt", tmp_path / "c.md"]
    assert inputs.skipped == {tmp_path / name: why for name, why in others.items()}


@pytest.mark.parametrize(
    "name", ["a.md", "a.rst", "a.html", "a.py", "a.tex.gz", "LICENSE", "LICENSE-2.0", "ls.1"]
)
def test_a_text_file_is_one_document_whatever_its_ending(tmp_path: Path, name: str) -> None:
    pack = PACKINGS[".gz" if name.endswith(".gz") else ""]
    # The last character ends after what is read to tell text from other content.
    text = "x" * (corpus.SNIFFED_BYTES - 1) + "\u00e9"
    path = write(tmp_path / name, pack(text.encode()))
    assert read(tmp_path) == read(path) == [Document(text, name)]


def test_a_file_without_an_ending_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"a\0b", b"caf\xe9 au lait"):
        with pytest.raises(DataError, match=r"LICENSE: unsupported ending.* name it LICENSE\.txt"):
            read(write(tmp_path / "LICENSE", content))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", b"\xef\xbb\xbfcaf\xc3\xa9\n"),
        ("a.txt", "\ufeffcaf\u00e9\n".encode("utf-16-le")),
        ("a.txt", "\ufeffcaf\u00e9\n".encode("utf-16-be")),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "caf\\u00e9\\n"}'),
    ],
)
def test_a_byte_order_mark_is_repaired(tmp_path: Path, name: str, data: bytes) -> None:
    path = write(tmp_path / name, data)
    expected = Document("caf\u00e9\n", name, is_repaired=True)
    assert read(path) == [expected]
    assert repair(path) == ([expected], Tally(documents=1, repaired=1))


def test_only_a_mark_at_the_start_of_a_file_is_taken_away(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xef\xbb\xbfb"}')
    assert [d.text for d in read(path)] == ["a", "\ufeffb"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", b"x", r"a\.csv: unsupported ending, expected text .*; .* name it a\.csv\.txt"),
        ("a.jsonl", b'{"text": "x"}\n{oops\n', r"a\.jsonl: line 2: invalid JSON"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl: line 1: invalid JSON"),
        ("a.jsonl", b'"text"', r"line 1: expected a JSON object, found str"),
        ("a.jsonl", b'{"txt": "x"}', r'line 1: the object has no field "text"'),
        ("a.jsonl", b'{"text": 3}', r'line 1: field "text" is int, not a string'),
        ("a.jsonl", b'{"text": "x", "source": []}', r'"source" is list, not a string'),
        ("a.jsonl", b'\n{"text": "\xff"}', r"line 2: invalid UTF-8 at byte 11"),
        ("a.jsonl", b'{"text": "ab\\ud800"}', r"line 1: lone surrogate at character 3"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ""}', r"line 2: empty document"),
        ("a.txt", b"", r"a\.txt: document 1: empty document"),
        ("a.jsonl", b'{"text": null}', r'line 1: field "text" is NoneType, not a string'),
        ("a.txt", b"\xff\xfea\x00\x00\xd8", r"a\.txt: document 1: invalid UTF-16 at byte 3"),
        ("a.txt", b"\xef\xbb\xbf", r"a\.txt: document 1: empty document"),
        ("a.txt", b"ok\n\xc3", r"a\.txt: document 1: invalid UTF-8 at byte 4"),
        ("a.txt", b"a\xed\xa0\x80", r"a\.txt: document 1: invalid UTF-8 at byte 2"),
        ("a.txt.gz", b"not gzip", r"a\.txt\.gz: line 1: cannot be read"),
        ("a.txt.xz", b"not xz", r"a\.txt\.xz: line 1: cannot be read"),
        ("a.txt.zst", b"not zstd", r"a\.txt\.zst: line 1: cannot be read"),
    ],
)
def test_refusals_name_the_file_and_the_line(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(write(tmp_path / name, data))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packing", [".xz", ".gz", ".zst"])
def test_a_file_cut_short_is_refused(tmp_path: Path, packing: str) -> None:
    lines = b"".join(
        json.dumps({"text": hashlib.sha256(bytes([i])).hexdigest()}).encode() + b"\n"
        for i in range(200)
    )
    packed = PACKINGS[packing](lines)
    with pytest.raises(DataError, match="cannot be read"):
        read(write(tmp_path / f"cut.jsonl{packing}", packed[: len(packed) - 9]))


def test_missing_file_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: no such file"):
        read(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"folder holds no file that is text \(\.txt"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["long.txt", "long.jsonl"])
def test_a_document_over_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 100)
    write(tmp_path / name, b"x" * 60 + b"\n" + b"x" * 60)
    with pytest.raises(DataError, match=r"line [12]: (document over 100 bytes|invalid JSON)"):
        read(tmp_path / name)
    write(tmp_path / name, b"x" * 101)
    with pytest.raises(DataError, match="line 1: document over 100 bytes, split it first"):
        read(tmp_path / name)


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"words")
    with pytest.raises(DataError, match=r"a\.txt: named 2 times, name it once"):
        read(tmp_path, path)


def test_another_policy_for_bad_input_is_refused() -> None:
    with pytest.raises(DataError, match="bad_input is 'skip', expected 'refuse' or 'repair'"):
        Reading(bad_input="skip")


@pytest.mark.parametrize(
    ("name", "data", "text", "num_replaced"),
    [
        ("a.txt", b"ok \xff\xfe end \xef\xbf\xbd", "ok \ufffd\ufffd end \ufffd", 2),
        ("a.txt", b"cut \xe2\x82", "cut \ufffd", 1),
        ("a.jsonl", b'{"text": "a\xffb"}', "a\ufffdb", 1),
        ("a.jsonl", b'{"text": "a\\ud800b\\udfff"}', "a\ufffdb\ufffd", 2),
        ("a.jsonl", b'{"text": "\xff\\udc80"}', "\ufffd\ufffd", 2),
    ],
)
def test_bad_text_is_repaired_and_counted(
    tmp_path: Path, name: str, data: bytes, text: str, num_replaced: int
) -> None:
    documents, tally = repair(write(tmp_path / name, data))
    assert documents == [Document(text, name, is_repaired=True)]
    assert tally == Tally(documents=1, repaired=1, replaced_characters=num_replaced)


def test_good_text_is_not_repaired(tmp_path: Path) -> None:
    line = b'{"text": "\\u0000 \\ufffd \\ud83d\\ude00 \\ue001 \xef\xbf\xbd"}'
    good = Document("\x00 \ufffd \U0001f600 \ue001 \ufffd", "a.jsonl")
    path = write(tmp_path / "a.jsonl", line)
    assert repair(path) == ([good], Tally(documents=1))
    assert read(path) == [good]


def test_empty_documents_are_left_out_and_counted_and_blank_lines_are_none(tmp_path: Path) -> None:
    lines = b'\n{"text": ""}\n \t\n{"text": "a"}\r\n{"text": ""}\n\n{"text": "b"}'
    path = write(tmp_path / "a.jsonl", lines)
    documents, tally = repair(path)
    assert [document.text for document in documents] == ["a", "b"]
    assert tally == Tally(documents=4, left_out_empty=2)
    with pytest.raises(DataError, match=r"a\.jsonl: line 2: empty document, remove it or read"):
        read(path)
    assert repair(write(tmp_path / "b.txt", b"")) == ([], Tally(documents=1, left_out_empty=1))


def test_broken_records_are_refused_even_where_text_is_repaired(tmp_path: Path) -> None:
    for line in (b"{oops", b"[]", b'{"text": 3}', b'{"no": "text"}'):
        with pytest.raises(DataError, match=r"a\.jsonl: line 1: "):
            repair(write(tmp_path / "a.jsonl", line))


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "no", "body": "yes"}')
    assert [d.text for d in read_documents([path], Reading(field="body"))] == ["yes"]
    with pytest.raises(DataError, match=r'line 1: the object has no field "content"'):
        list(read_documents([path], Reading(field="content")))


@pytest.mark.parametrize(("batch_bytes", "num_batches"), [(1, 20), (30, 8), (1 << 20, 1)])
def test_batches_keep_the_numbers_of_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int, num_batches: int
) -> None:
    monkeypatch.setattr(corpus, "BATCH_BYTES", batch_bytes)
    lines = [b'{"text": "%d"}\n' % i for i in range(20)]
    lines[7] = b"\n"
    path = write(tmp_path / "a.jsonl", b"".join(lines))
    batches = list(read_raw(path))
    assert [r for batch in batches for r in batch.records] == lines
    assert len(batches) == num_batches
    assert [d.text for d in read(path)] == [str(i) for i in range(20) if i != 7]
    lines[15] = b'{"text": "\xff"}\n'
    with pytest.raises(DataError, match="line 16: invalid UTF-8"):
        read(write(path, b"".join(lines)))


def test_a_tally_adds_up() -> None:
    tally = Tally(1, 2, 3, 4)
    tally.add(Tally(10, 20, 30, 40))
    assert tally == Tally(11, 22, 33, 44)


def test_zstd_without_its_package_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(DataError, match="pip install zstandard"):
        read(write(tmp_path / "a.txt.zst", b""))


def test_hash_is_sha256_of_utf8() -> None:
    assert document_hash("caf\u00e9") == hashlib.sha256(b"caf\xc3\xa9").digest()


def test_held_out_compares_the_first_eight_bytes_big_endian() -> None:
    rest = b"\xff" * 24
    assert is_held_out(bytes.fromhex("3fffffffffffffff") + rest, 0.25)
    assert not is_held_out(bytes.fromhex("4000000000000000") + rest, 0.25)
    assert not is_held_out(bytes(32), 0.0)
    assert is_held_out(b"\xff" * 32, 1.0)


def test_held_out_share_is_near_the_fraction() -> None:
    share = sum(is_held_out(document_hash(str(i)), 0.1) for i in range(20_000)) / 20_000
    assert abs(share - 0.1) < 0.01


def test_the_demo_corpus_is_complete() -> None:
    documents = read(demo_corpus())
    assert len(documents) == 633
    assert sum(len(document.text.encode()) for document in documents) == 2_635_028
    assert {document.source for document in documents} >= {"wikinews_en", "books_novels"}
