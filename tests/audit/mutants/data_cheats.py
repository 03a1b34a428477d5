"""Cheats in the data folder, as data."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from forge import Forge, Mutant, for_training, for_validation

from underpar.audit.finding import NOT_SHOWN
from underpar.data.shards import Columns

Tree = dict[str, Any]
Texts = list[str]


def held_out(change: Callable[[Texts], Sequence[str]]) -> Callable[[Forge], object]:
    """Other held-out texts, in shard, manifest and source."""
    return lambda forge: forge.write_texts("val", change(forge.texts("val")))


def copied(
    change: Callable[[str], str | Sequence[str]], number: int = 1
) -> Callable[[Forge], object]:
    """Versions of the longest held-out documents, added to training."""

    def edit(forge: Forge) -> None:
        longest = sorted(forge.texts("val"), key=len)[-number:]
        added: Texts = []
        for version in map(change, longest):
            added += [version] if isinstance(version, str) else version
        forge.write_texts("train", [*forge.texts("train"), *map(for_training, added)])

    return edit


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def shuffled(text: str) -> str:
    parts = sentences(text)
    random.Random(1).shuffle(parts)
    return " ".join(parts)


def every_tenth_word(text: str) -> str:
    words = text.split(" ")
    words[::10] = ["xyzzy"] * len(words[::10])
    return " ".join(words)


def in_pieces(text: str, num_words: int = 24) -> list[str]:
    words = text.split(" ")
    return [" ".join(words[i : i + num_words]) for i in range(0, len(words), num_words)]


def inside_a_long_one(text: str) -> str:
    other = " ".join(f"word{i}" for i in range(3000))
    return f"{other} {text} {other}"


def columns(split: str, **changes: Callable[[np.ndarray], np.ndarray]) -> Callable[[Forge], object]:
    """Other columns of a split's table, with all checksums of it."""

    def change(old: Columns) -> Columns:
        return replace(old, **{name: f(getattr(old, name).copy()) for name, f in changes.items()})

    return lambda forge: forge.edit_split(split, change)


def put(index: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[index] = value
        return values

    return change


def more_bytes(forge: Forge) -> None:
    """A tenth more bytes per document, in shard, manifest and ledgers."""
    forge.edit_split("val", lambda c: replace(c, doc_bytes=c.doc_bytes * 11 // 10))
    forge.edit_ledgers(lambda rows: [r.update(num_bytes=r["num_bytes"] * 11 // 10) for r in rows])


def byte_per_token(forge: Forge) -> None:
    """The mistake of PR 1545 and others: a byte too many per token."""
    forge.edit_split("val", lambda c: replace(c, doc_bytes=c.doc_bytes + c.counts))
    forge.edit_ledgers(
        lambda rows: [r.update(num_bytes=r["num_bytes"] + r["num_targets"]) for r in rows]
    )


def spelled(forge: Forge) -> None:
    """The first document in bytes instead of words: the same text in other tokens."""
    tokenizer = forge.tokenizer
    of_byte = {tokenizer.decode([i]): i for i in range(3, 300) if len(tokenizer.decode([i])) == 1}

    def change(old: Columns) -> Columns:
        end = int(old.counts[0])
        raw = tokenizer.decode(old.tokens[:end])
        ids = [of_byte[bytes([byte])] for byte in raw]
        tokens = np.concatenate([old.tokens[:1], np.array(ids, np.uint16), old.tokens[end:]])
        return replace(old, tokens=tokens, counts=put(0, len(ids) + 1)(old.counts.copy()))

    forge.edit_split("val", change)


def other_tokenizer(forge: Forge) -> None:
    """The same pieces with two of them exchanged."""
    content = (forge.data / "tokenizer.model").read_bytes()
    (forge.data / "tokenizer.model").write_bytes(content.replace(b"the", b"eht", 1))


def cut_source(forge: Forge) -> None:
    """Half of the held-out documents left out of the shard; the source file has them still."""
    half = len(forge.texts("val")) // 2
    forge.edit_split("val", lambda c: forge.columns_of(forge.texts("val")[:half]))


def edit_source(change: Callable[[Texts], Texts]) -> Callable[[Forge], object]:
    """Another source file, whose checksum the manifest has."""

    def edit(forge: Forge) -> None:
        forge.write_source()
        source = Path(forge.manifest["inputs"][0]["path"])
        texts = change([json.loads(line)["text"] for line in source.read_text().splitlines()])
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        from underpar.data.folder import hash_file

        forge.edit_manifest(lambda m: m["inputs"][0].update(sha256=hash_file(source)))

    return edit


def lose_source(forge: Forge) -> None:
    forge.write_source()
    Path(forge.manifest["inputs"][0]["path"]).unlink()


def easy_text(forge: Forge) -> None:
    """Held-out documents of the commonest words, scored honestly."""
    count = len(forge.texts("val"))
    texts = [for_validation(" ".join(["the of and to a in"] * (60 + i))) for i in range(count)]
    forge.write_texts("val", texts)
    for method in ("plain", "adapt"):
        forge.run.score_file(method).unlink()
    forge.score()


def near_repeats(texts: Texts) -> Texts:
    """One document for all, with another word in each."""
    longest = max(texts, key=len)
    return [for_validation(f"{longest} {number}") for number in range(len(texts))]


def one_giant(forge: Forge) -> None:
    """A document of one sentence, repeated until nothing else counts; scored honestly."""
    texts = forge.texts("val")
    giant = for_validation("all work and no play makes a dull boy. " * 800)
    forge.write_texts("val", [*texts, giant])
    for method in ("plain", "adapt"):
        forge.run.score_file(method).unlink()
    forge.score()


def two_fifths_of_all(forge: Forge) -> None:
    """Two fifths of every held-out document, each in a training document of its own."""
    parts = [text[: 2 * len(text) // 5] for text in forge.texts("val")]
    forge.write_texts("train", [*forge.texts("train"), *map(for_training, parts)])


def forget_copies(forge: Forge) -> None:
    """An exact copy, and a manifest that owns up to none."""
    forge.write_texts("train", [*forge.texts("train"), forge.texts("val")[0]])


def declare_file_split(forge: Forge) -> None:
    """An exact copy, in data whose split is by file, says the manifest."""
    forget_copies(forge)
    forge.edit_manifest(lambda m: m.update(split={"rule": "by file", "fraction": None}))


DATA_CHEATS = [
    Mutant("truncated", "half of the held-out documents left out", "bytes", cut_source),
    Mutant("reordered text", "held-out documents in an order of choice", "bytes",
           lambda f: f.edit_split("val", lambda c: f.columns_of(f.texts("val")[::-1]))),
    Mutant("bytes of documents", "a tenth more bytes in shard, manifest and ledgers", "bytes",
           more_bytes),
    Mutant("byte per token", "a byte more per token in shard, manifest and ledgers", "bytes",
           byte_per_token),
    Mutant("hash", "the hash of a held-out document", "bytes",
           columns("val", doc_hashes=lambda rows: np.flip(rows, axis=1).copy())),
    Mutant("token", "one held-out token", "bytes", columns("val", tokens=put(5, 400))),
    Mutant("spelled", "other tokens of the same text", "bytes", spelled),
    Mutant("source edited", "a word in the source file", "bytes",
           edit_source(lambda texts: [text.replace("the", "a", 1) for text in texts])),
    Mutant("source cut", "documents left out of the source file", "bytes",
           edit_source(lambda texts: texts[: len(texts) // 2])),
    Mutant("no inputs", "a manifest without inputs", "bytes",
           lambda f: f.edit_manifest(lambda m: m.update(inputs=[]))),
    Mutant("odd inputs", "inputs of another shape", "bytes",
           lambda f: f.edit_manifest(lambda m: m.update(inputs=[{"file": 7}]))),
    Mutant("source lost", "a source file that is not there", "bytes", lose_source, NOT_SHOWN),
    Mutant("no reading", "a manifest that does not say how the source was read", "bytes",
           lambda f: f.edit_manifest(lambda m: m.pop("reading")), NOT_SHOWN),
    Mutant("tokenizer replaced", "the tokenizer of the data folder", "opening", other_tokenizer),
    Mutant("counts", "the number of documents in the manifest", "opening",
           lambda f: f.edit_json(f.data / "manifest.json",
                                 lambda m: m["val"].update(documents=1))),
    Mutant("bytes per token", "more bytes per token in the manifest, which is shown",
           "identity", lambda f: f.edit_manifest(lambda m: m["val"].update(bytes_per_token=9.9))),
    Mutant("repaired", "fewer changed and repaired documents in the manifest", "identity",
           lambda f: f.edit_manifest(lambda m: m["train"].update(repaired=-1))),
    Mutant("vocabulary", "a smaller vocabulary in the manifest", "identity",
           lambda f: f.edit_manifest(lambda m: m["tokenizer"].update(vocab_size=256))),
    Mutant("training text", "training documents in place of held-out ones", "splits",
           lambda f: f.write_texts("val", f.texts("train")[: len(f.texts("val"))])),
    Mutant("other share", "the share that is held out, in the manifest", "splits",
           lambda f: f.edit_manifest(lambda m: m["split"].update(fraction=0.5))),
    Mutant("repeated", "one held-out document for all", "splits",
           held_out(lambda texts: [texts[0]] * len(texts))),
    Mutant("copied", "one held-out document added to training", "splits", forget_copies),
    Mutant("copied by file", "the same in data whose files decide the split", "splits",
           declare_file_split),
    Mutant("copied with another end", "a full stop added", "splits", copied(lambda t: t + " .")),
    Mutant("copied in capitals", "other case", "splits", copied(str.upper)),
    Mutant("copied with other words", "every tenth word replaced", "splits",
           copied(every_tenth_word)),
    Mutant("copied in other order", "sentences shuffled", "splits", copied(shuffled)),
    Mutant("copied backwards", "words in reverse order", "splits",
           copied(lambda t: " ".join(t.split(" ")[::-1]))),
    Mutant("copied in pieces", "cut into documents of 24 words", "splits", copied(in_pieces)),
    Mutant("copied in halves", "cut into two documents", "splits",
           copied(lambda t: [t[: len(t) // 2], t[len(t) // 2 :]])),
    Mutant("copied inside", "in the middle of a long document", "splits",
           copied(inside_a_long_one)),
    Mutant("copied one by one", "every sentence a document", "splits", copied(sentences)),
    Mutant("copied joined", "all held-out documents as one", "splits",
           lambda f: f.write_texts("train", [*f.texts("train"),
                                             for_training(" ".join(f.texts("val")))])),
    Mutant("copied in part", "two fifths of every document", "splits", two_fifths_of_all),
    Mutant("nearly repeated", "one held-out document for all, another word in each", "splits",
           held_out(near_repeats)),
    Mutant("giant", "a held-out document of one sentence, longer than all others", "memorization",
           one_giant, NOT_SHOWN),
    Mutant("easy text", "held-out documents of common words, scored honestly", "memorization",
           easy_text),
]  # fmt: skip
