"""Lossless SentencePiece: train a model and turn any bytes into ids and back, byte for byte."""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from underpar.errors import DataError
from underpar.seams import BOS_ID

# Four reserved ids and the 256 byte pieces; a model needs at least one piece more.
MIN_VOCAB_SIZE = 261
MAX_MODEL_BYTES = 1 << 26

_SPACE_MARK = "\u2581"
# What SentencePiece cannot take as it is: its own space mark, and bytes that are not UTF-8,
# which "surrogateescape" turns into U+DC80..U+DCFF.
_ODD_RUN = re.compile("([\udc80-\udcff\u2581]+)")
# The trainer skips a sentence over 4,192 bytes without a word. 1,000 characters stay below that,
# cut where a word starts, since a space or newline belongs to the word that follows it.
_TRAINING_PIECE = re.compile(r".{1,1000}(?=[ \n]|\Z)|.{1,1000}", re.DOTALL)
# The trainer also skips every sentence with U+2585, its private mark for unknown characters.
_TRAINING_DROPS = {ord(_SPACE_MARK): None, 0x2585: None}
# Strings that a dummy prefix, whitespace clean-up or NFKC would change.
_PROBES = ("a  b", " lead", "trail ", "tab\t", "a\nb", "a\u00a0b", "\u00bd", "\ufb01", "e\u0301")
_TRAINING_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "byte_fallback": True,
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "character_coverage": 0.999,
    "pad_id": 0,
    "bos_id": BOS_ID,
    "eos_id": 2,
    "unk_id": 3,
    "hard_vocab_limit": False,
    # The model stores this number, so it must not depend on the machine.
    "num_threads": 1,
    "minloglevel": 2,
}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a lossless BPE model of exactly `vocab_size` pieces; same texts, same bytes."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(f"vocab_size is {vocab_size}, expected at least {MIN_VOCAB_SIZE}")
    # A list, because an error raised inside a sentence iterator would be lost in the trainer.
    pieces = [piece for text in texts for piece in _training_pieces(text)]
    if not pieces:
        raise DataError("no text to train a tokenizer on, add documents")
    writer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(pieces),
            model_writer=writer,
            vocab_size=vocab_size,
            **_TRAINING_OPTIONS,
        )
    except RuntimeError as error:
        detail = str(error).rpartition("] ")[2]
        raise DataError(
            f"vocab_size {vocab_size} does not fit the characters of the text, raise it ({detail})"
        ) from error
    model = _load_model(writer.getvalue())
    if model.vocab_size() < vocab_size:
        raise DataError(
            f"the text is too small for vocab_size {vocab_size}: "
            f"add text or set vocab_size to at most {model.vocab_size()}"
        )
    return writer.getvalue()


def _training_pieces(text: str) -> Iterator[str]:
    return (match.group() for match in _TRAINING_PIECE.finditer(text.translate(_TRAINING_DROPS)))


def _load_model(model_proto: bytes) -> sentencepiece.SentencePieceProcessor:
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(model_proto)
    except (RuntimeError, ValueError) as error:
        raise DataError(f"not a SentencePiece model: {error}") from error
    return model


class Tokenizer:
    """A SentencePiece model with which decode(encode(x)) == x holds for any bytes x."""

    bos_id = BOS_ID

    def __init__(self, model_proto: bytes) -> None:
        self._model = _load_model(model_proto)
        self.model_proto = model_proto
        self.identity = hashlib.sha256(model_proto).hexdigest()
        self.vocab_size: int = self._model.vocab_size()
        try:
            self._table = [self._bytes_of(piece_id) for piece_id in range(self.vocab_size)]
            self._byte_ids = self._find_byte_ids()
            self._refuse_lossy()
        except (RuntimeError, ValueError) as error:
            raise DataError(f"tokenizer holds a malformed piece: {error}") from error
        self.token_bytes = np.array([len(piece) for piece in self._table], dtype=np.int32)

    @classmethod
    def from_bytes(cls, model_proto: bytes) -> "Tokenizer":
        """Load a serialized model; one that is damaged or loses text is refused."""
        return cls(model_proto)

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Load a .model file; one that is damaged or loses text is refused."""
        return cls(read_model(path))

    def encode(self, data: bytes) -> npt.NDArray[np.int32]:
        """Ids of any bytes, without BOS."""
        ids: list[int] = []
        for index, run in enumerate(_ODD_RUN.split(data.decode("utf-8", "surrogateescape"))):
            raw = run.encode("utf-8", "surrogateescape")
            is_odd = index % 2 == 1
            run_ids = None if is_odd else self._if_exact(self._model.encode(run), raw)
            ids += self._encode_as_bytes(raw) if run_ids is None else run_ids
        return np.array(ids, dtype=np.int32)

    def encode_documents(
        self, texts: Sequence[str], num_threads: int = -1
    ) -> list[npt.NDArray[np.int32]]:
        """Ids of each text, as `encode` gives them, on several threads (-1: one per core)."""
        raws = [_to_utf8(text) for text in texts]
        encoded = self._model.encode(list(texts), num_threads=num_threads)
        return [
            self.encode(raw) if self._if_exact(ids, raw) is None else np.array(ids, dtype=np.int32)
            for raw, ids in zip(raws, encoded, strict=True)
        ]

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """The bytes that ids stand for; pad, BOS, EOS and unknown stand for none."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and not 0 <= array.min() <= array.max() < self.vocab_size:
            raise DataError(
                f"token ids span {array.min()}..{array.max()}, expected 0..{self.vocab_size - 1}"
            )
        return self._join(array.tolist())

    def _join(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._table.__getitem__, ids))

    def _if_exact(self, ids: list[int], raw: bytes) -> list[int] | None:
        return ids if self._join(ids) == raw else None

    def _encode_as_bytes(self, raw: bytes) -> list[int]:
        return [self._byte_ids[byte] for byte in raw]

    def _bytes_of(self, piece_id: int) -> bytes:
        piece = self._model.id_to_piece(piece_id)
        if self._model.is_byte(piece_id):
            return bytes([int(piece[3:5], 16)])
        if self._model.is_control(piece_id) or self._model.is_unknown(piece_id):
            return b""
        return piece.replace(_SPACE_MARK, " ").encode("utf-8")

    def _find_byte_ids(self) -> list[int]:
        of_byte = {
            self._table[piece_id][0]: piece_id
            for piece_id in range(self.vocab_size)
            if self._model.is_byte(piece_id)
        }
        if len(of_byte) != 256:
            raise DataError(
                f"tokenizer has {len(of_byte)} of 256 byte pieces, train it with byte_fallback"
            )
        return [of_byte[byte] for byte in range(256)]

    def _refuse_lossy(self) -> None:
        if not self._model.is_control(BOS_ID):
            raise DataError(f"tokenizer id {BOS_ID} is not a control piece, train it with bos_id=1")
        for probe in _PROBES:
            ids = self._model.encode(probe)
            if self._join(ids) != probe.encode("utf-8"):
                raise DataError(
                    f"tokenizer is lossy: {probe!a} becomes {self._join(ids)!r}, "
                    "train it with identity normalisation, no dummy prefix, all whitespace kept"
                )


def read_model(path: Path) -> bytes:
    """The bytes of a .model file, if there is one of a believable size."""
    try:
        if path.stat().st_size > MAX_MODEL_BYTES:
            raise DataError(f"{path}: over {MAX_MODEL_BYTES} bytes, not a tokenizer")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: tokenizer cannot be read: {error.strerror}") from error


def _to_utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"lone surrogate at character {error.start + 1} of a document") from error
