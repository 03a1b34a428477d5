"""Benchmarks of `data build`: against SentencePiece alone, and two processes against one."""

from __future__ import annotations

import json
import lzma
import tempfile
from pathlib import Path

import sentencepiece

from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import load_data
from underpar.data.sources.corpus import demo_corpus, read_documents
from underpar.data.tokens.train_bpe import train_tokenizer
from underpar.data.transforms import open_transform
from underpar.lab.bench import Bench

TRANSFORM = "caseops_before"
# Large enough to fill the table of words, small enough for twelve rounds.
SLICE_BYTES, CORES_SLICE_BYTES = 16_000_000, 48_000_000

_VOCAB_SIZE, _SMALL_VOCAB_SIZE, _SMALL_BYTES = 8192, 2048, 5_000_000
_SAMPLE_DOCUMENTS = 4


def data(source: Path | None) -> Bench:
    """Text to checked shards (read, transform, encode, count bytes) against bare SentencePiece."""
    work = _Workplace(source, SLICE_BYTES)
    model = sentencepiece.SentencePieceProcessor(model_proto=work.tokenizer.read_bytes())
    written = [open_transform(TRANSFORM).forward(text) for text in work.texts]

    def check() -> None:
        work.build(1)
        folder = load_data(work.out)
        documents = [shard.doc(i) for shard in (folder.train,) for i in range(shard.num_documents)]
        alone = {tuple(ids) for ids in model.encode(written)}
        assert all(tuple(tokens[1:].tolist()) in alone for tokens in documents), "ids differ"

    return Bench(
        name="data",
        what=f"{work.num_bytes / 1e6:.1f} MB of text, {TRANSFORM}, one core",
        a=lambda: model.encode(written, num_threads=1),
        b=lambda: work.build(1),
        label_a="sentencepiece, text in memory, ids only",
        label_b="data build, file to checked shards",
        check=check,
    )


def data_cores(source: Path | None) -> Bench:
    """Building a data folder: one process against two."""
    work = _Workplace(source, CORES_SLICE_BYTES)

    def check() -> None:
        hashes = [work.build(workers)["train"]["sha256"] for workers in (1, 2)]
        assert hashes[0] == hashes[1], "two processes wrote another shard"

    return Bench(
        name="data_cores",
        what=f"data build of {work.num_bytes / 1e6:.1f} MB of text, {TRANSFORM}",
        a=lambda: work.build(1),
        b=lambda: work.build(2),
        label_a="one process",
        label_b="two processes",
        check=check,
    )


class _Workplace:
    """A part of a corpus as one .jsonl.xz file, its tokenizer, and a folder for the result."""

    def __init__(self, source: Path | None, max_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="underpar-bench-")
        folder = Path(self._folder.name)
        self.texts: list[str] = []
        self.num_bytes = 0
        for document in read_documents([source or demo_corpus()]):
            if self.num_bytes >= max_bytes:
                break
            self.texts.append(document.text)
            self.num_bytes += len(document.text.encode())
        self.out = folder / "data"
        self._input = folder / "slice.jsonl.xz"
        with lzma.open(self._input, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in self.texts)
        small = self.num_bytes < _SMALL_BYTES
        sample = self.texts if small else self.texts[::_SAMPLE_DOCUMENTS]
        self.tokenizer = folder / "tokenizer.model"
        vocab_size = _SMALL_VOCAB_SIZE if small else _VOCAB_SIZE
        self.tokenizer.write_bytes(train_tokenizer(sample, vocab_size, TRANSFORM))

    def build(self, workers: int) -> dict[str, dict[str, str]]:
        """Build the folder and return its manifest."""
        options = BuildOptions(
            vocab_size=None,
            holdout=0.01,
            tokenizer=self.tokenizer,
            transform=TRANSFORM,
            workers=workers,
        )
        return build_data([self._input], self.out, options, overwrite=True)
