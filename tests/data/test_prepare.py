"""Preparing raw batches: columns by split, flags, ledgers, and the same from any worker."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from small_data import prose, published_model
from underpar.data.hold_out import BY_FILE, HoldOut, by_hash
from underpar.data.prepare import Job, Plan, Prepared, Preparer, prepare_all
from underpar.data.shards import CHANGED, REPAIRED, Columns
from underpar.data.sources.corpus import RawBatch, Reading, Tally, document_hash, is_held_out
from underpar.data.tokens import byte260
from underpar.data.tokens.train_bpe import train_tokenizer
from underpar.errors import DataError

TEXTS = (*prose(12, 600), "Caf\u00e9 \U0001f600 NASA", "\ue001 \u2581\x00 odd  ")


def raw_batch(texts: list[str], first: int = 1) -> RawBatch:
    records = [json.dumps({"text": text}).encode() for text in texts]
    return RawBatch("docs.jsonl", True, first, records)


def plan(
    tokenizer: bytes = byte260.CONTENT,
    transform: str = "identity",
    fraction: float | None = None,
    bad_input: str = "refuse",
) -> Plan:
    hold_out = by_hash(fraction) if fraction else HoldOut(BY_FILE)
    return Plan(tokenizer, transform, Reading(bad_input=bad_input), hold_out)


def documents(columns: Columns) -> list[np.ndarray]:
    return np.split(columns.tokens, columns.starts[1:])


def same(a: Prepared, b: Prepared) -> bool:
    assert a.splits.keys() == b.splits.keys()
    for name, columns in a.splits.items():
        for field, value in vars(columns).items():
            assert np.array_equal(value, vars(b.splits[name])[field]), (name, field)
    return a.tally == b.tally


@pytest.mark.parametrize("transform", ["identity", "caseops", "caseops_before", "caseops_pair"])
def test_columns_say_everything_about_their_documents(transform: str) -> None:
    content = train_tokenizer(prose(40), 400, transform)
    preparer = Preparer(plan(content, transform))
    columns = preparer.prepare(raw_batch(list(TEXTS)), "val").splits["val"]
    assert columns.tokens.dtype == np.uint16
    assert columns.source_bytes is not None
    assert len(columns.tokens) == len(columns.source_bytes) == columns.counts.sum()
    source_bytes = np.split(columns.source_bytes, columns.starts[1:])
    for index, text in enumerate(TEXTS):
        document, raw = documents(columns)[index], text.encode()
        assert document[0] == 1 and 1 not in document[1:]
        assert preparer.tokenizer.decode(document) == raw
        assert source_bytes[index][0] == 0
        assert source_bytes[index].sum() == columns.doc_bytes[index] == len(raw)
        assert columns.doc_hashes[index].tobytes() == hashlib.sha256(raw).digest()
    assert not columns.flags.any()
    # Only the escaped operator of the last text is beyond a table.
    assert columns.num_off_table == (transform != "identity")


def test_documents_go_to_their_split_and_keep_their_order() -> None:
    texts = [f"document {i}" for i in range(60)]
    prepared = Preparer(plan(fraction=0.3)).prepare(raw_batch(texts), "train")
    tokenizer = byte260.ByteTokenizer()
    for split, wanted in (("train", False), ("val", True)):
        expected = [text for text in texts if is_held_out(document_hash(text), 0.3) is wanted]
        columns = prepared.splits[split]
        assert [tokenizer.decode(d).decode() for d in documents(columns)] == expected
        assert (columns.source_bytes is None) == (split == "train")
    assert Preparer(plan()).prepare(raw_batch(texts), "val").splits.keys() == {"val"}


def test_a_split_without_documents_has_no_columns() -> None:
    batch = RawBatch("docs.jsonl", True, 1, [b'{"text": ""}', b"\n"])
    prepared = Preparer(plan(bad_input="repair")).prepare(batch, "train")
    assert prepared.splits == {}
    assert prepared.tally == Tally(documents=1, left_out_empty=1)


def test_changed_and_repaired_documents_are_flagged() -> None:
    records = [b"plain words", b"half \xc2\xbd", b"bad \xff byte", b"", b"\xfe\xff\xff"]
    batch = RawBatch("a.parquet", False, 1, records)
    # The published normalizer takes U+FFFD for a space.
    flags = {published_model(): CHANGED | REPAIRED, byte260.CONTENT: REPAIRED}
    for content, repaired in flags.items():
        prepared = Preparer(plan(content, bad_input="repair")).prepare(batch, "val")
        columns = prepared.splits["val"]
        is_changed = CHANGED if repaired & CHANGED else 0
        assert columns.flags.tolist() == [0, is_changed, repaired, repaired]
        assert columns.doc_hashes[2].tobytes() == document_hash("bad \ufffd byte")
        assert prepared.tally == Tally(5, left_out_empty=1, repaired=2, replaced_characters=4)
        assert (columns.num_off_table > 0) == bool(is_changed)


def test_one_preparer_gives_the_same_whatever_it_saw_before() -> None:
    content = train_tokenizer(prose(40), 400)
    used = Preparer(plan(content, fraction=0.2))
    used.prepare(raw_batch(list(prose(40))), "train")
    batch = raw_batch(list(TEXTS))
    fresh = Preparer(plan(content, fraction=0.2)).prepare(batch, "train")
    assert same(used.prepare(batch, "train"), fresh)
    assert same(used.prepare(batch, "train"), fresh)


def jobs(num_batches: int) -> list[Job]:
    return [
        (raw_batch([f"batch {i} text {j}" for j in range(5)], 5 * i + 1), "train")
        for i in range(num_batches)
    ]


def test_workers_give_the_same_in_the_same_order() -> None:
    made = jobs(10)
    alone = list(prepare_all(plan(fraction=0.2), made, 1))
    together = list(prepare_all(plan(fraction=0.2), iter(made), 2))
    assert [job for job, _ in alone] == [job for job, _ in together] == made
    assert all(same(a, b) for (_, a), (_, b) in zip(alone, together, strict=True))


def test_a_workers_refusal_arrives_as_it_is() -> None:
    made = jobs(3)
    made[1] = (RawBatch("docs.jsonl", True, 6, [b'{"text": "x"}', b"{"]), "train")
    messages = []
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"docs\.jsonl: line 7: invalid JSON") as caught:
            list(prepare_all(plan(), made, workers))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_fewer_than_one_worker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="workers is 0, expected at least 1"):
        list(prepare_all(plan(), jobs(1), 0))


ENDLESS = """
from itertools import repeat
from underpar.data.hold_out import by_hash
from underpar.data.prepare import Plan, prepare_all
from underpar.data.sources.corpus import RawBatch, Reading
from underpar.data.tokens import byte260

job = RawBatch("a.jsonl", True, 1, [b'{"text": "a"}']), "train"
plan = Plan(byte260.CONTENT, "identity", Reading(), by_hash(0.1))
for _ in prepare_all(plan, repeat(job), workers=2):
    print("started", flush=True)
"""


def test_workers_end_with_a_killed_parent() -> None:
    words = [sys.executable, "-c", ENDLESS]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout and process.stdout.readline() == b"started\n"
    process.kill()
    # The workers have the same standard output: it ends with the last of them.
    process.communicate(timeout=60)
