"""Text to ids and back: a SentencePiece model, and the transform that runs before it.

All callers encode word by word through one `WordTable`, so training, scoring and the codec use the
same ids.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece

from underpar.data.tokens.byte260 import ByteTokenizer
from underpar.data.tokens.ledger import Offsets, span_source_bytes, surfaces
from underpar.data.tokens.split import Splitter, splitter_for
from underpar.data.tokens.words import Pieces, WordTable
from underpar.data.transforms import IDENTITY, open_transform
from underpar.errors import DataError
from underpar.seams import BOS_ID

MAX_MODEL_BYTES = 1 << 26

_SPACE_MARK = "\u2581"
# Characters that SentencePiece cannot encode: its own space mark, and bytes that are not UTF-8
# ("surrogateescape" represents them as U+DC80..U+DCFF).
_ODD_RUN = re.compile("([\udc80-\udcff\u2581]+)")
# Texts that a model with a dummy prefix, whitespace clean-up or NFKC changes.
_PROBES = ("a  b", " lead", "trail ", "tab\t", "a\nb", "a\u00a0b", "\u00bd", "\ufb01", "e\u0301")
# Put before every word but the first of a document; otherwise the clean-up drops the word's space.
_LEAD = "."


class SentencePieceTokenizer:
    """A SentencePiece model and a transform.

    `encode` and `decode` are exact for any bytes. `encode_texts` gives the ids of the model itself;
    for a lossy model (one that normalizes), `changed` marks texts whose ids decode to another text.
    """

    kind = "sentencepiece"
    bos_id = BOS_ID

    def __init__(self, content: bytes, transform: str = IDENTITY) -> None:
        self.content = content
        self.transform_name = transform
        self.transform = open_transform(transform)
        name = b"" if transform == IDENTITY else b"\0" + transform.encode()
        self.identity = hashlib.sha256(content + name).hexdigest()
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
            self.vocab_size: int = self._model.vocab_size()
            self._table = [self._bytes_of(piece_id) for piece_id in range(self.vocab_size)]
            self._byte_ids = self._find_byte_ids()
            self._check_pieces()
            self.lossless = all(self._join(self._model.encode(p)) == p.encode() for p in _PROBES)
        except (RuntimeError, ValueError) as error:
            raise DataError(f"not a usable SentencePiece model: {error}") from error
        self._sizes = np.array([len(piece) for piece in self._table], dtype=np.int64)
        self._lead_ids = self._model.encode(_LEAD)

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Source bytes of each id in text without escapes and without normalization."""
        source_bytes = [self.transform.source_bytes(_to_text(piece)).sum() for piece in self._table]
        return np.array(source_bytes, dtype=np.int32)

    def encode(self, data: bytes) -> npt.NDArray[np.int32]:
        """Ids of any bytes, without BOS; `decode` gives the bytes back."""
        return self._exact_words.encode([self._splitter.keys(_to_text(data))]).tokens[1:]

    def encode_texts(self, texts: Sequence[str]) -> Pieces:
        """Tokens of each text by the model, BOS first, with the source bytes of each token."""
        return self._model_words.encode([self._splitter.keys(text) for text in texts])

    def written(self, ids: npt.ArrayLike) -> bytes:
        """The transformed text of the ids; pad, BOS, EOS and unknown have none."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and not 0 <= array.min() <= array.max() < self.vocab_size:
            raise DataError(
                f"token ids span {array.min()}..{array.max()}, expected 0..{self.vocab_size - 1}"
            )
        return self._join(array.tolist())

    @property
    def pieces(self) -> list[bytes]:
        """What each id stands for, as `written`."""
        return self._table

    def decode(self, ids: npt.ArrayLike) -> bytes:
        """The source bytes of the ids; an operator at an impossible place is refused.

        With a lossy model, the transformed text is returned unchanged instead: a normalizer may
        have written letters before an operator.
        """
        written = self.written(ids)
        try:
            return self._read(written)
        except DataError:
            if self.lossless:
                raise
            return written

    def _read(self, written: bytes) -> bytes:
        if self.transform_name == IDENTITY:
            return written
        return _to_bytes(self.transform.inverse(_to_text(written)))

    @cached_property
    def _model_words(self) -> WordTable:
        return WordTable(partial(self._encode_words, exact=self.lossless))

    @cached_property
    def _exact_words(self) -> WordTable:
        if self.lossless:
            return self._model_words
        return WordTable(partial(self._encode_words, exact=True))

    @cached_property
    def _splitter(self) -> Splitter:
        return splitter_for(self._table, self.lossless)

    def _encode_words(self, words: list[str], exact: bool) -> Pieces:
        texts = list(map(self._splitter.word, words))
        written = list(map(self.transform.forward, texts))
        ids = self._model_ids(written, words, exact)
        wrong = self._inexact(ids, written)
        if exact:
            for i in wrong:
                ids[i] = self._spell(written[i])
            wrong = []
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), np.int32, int(counts.sum()))
        ends = np.cumsum(self._sizes[tokens])
        begins = ends - self._sizes[tokens]
        changed = np.zeros(len(words), dtype=bool)
        if wrong:
            self._align((begins, ends), counts, written, words, wrong)
            changed[wrong] = [not self._reads_as(ids[i], texts[i]) for i in wrong]
        source_bytes = span_source_bytes("".join(written), begins, ends, self.transform)
        return Pieces(tokens, source_bytes.astype(np.int32), counts, changed)

    def _model_ids(self, written: list[str], words: list[str], exact: bool) -> list[list[int]]:
        if exact and _ODD_RUN.search("".join(written)):
            # No ids of the model decode to these characters; `_spell` replaces the ids later.
            written = [_ODD_RUN.sub("", word) for word in written]
        if self.lossless:
            return self._ids(written)
        is_first = list(map(self._splitter.is_first, words))
        led = [w if first else _LEAD + w for w, first in zip(written, is_first, strict=True)]
        num_lead = len(self._lead_ids)
        return [
            ids if first else ids[num_lead:]
            for ids, first in zip(self._ids(led), is_first, strict=True)
        ]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # One thread: a batch has few new words, and whole batches run in parallel.
        ids: list[list[int]] = self._model.encode(texts, num_threads=1)
        return ids

    def _inexact(self, ids: list[list[int]], written: list[str]) -> list[int]:
        """Indices of words that their ids do not decode to."""
        # One comparison of the joined text is faster. A normalizer could change two words so that
        # the joined text is right by chance, so lossy models compare word by word.
        if self.lossless and self._join(chain.from_iterable(ids)) == _to_bytes("".join(written)):
            return []
        return [i for i, w in enumerate(written) if self._join(ids[i]) != _to_bytes(w)]

    def _align(
        self,
        spans: tuple[Offsets, Offsets],
        counts: Offsets,
        written: list[str],
        words: list[str],
        wrong: list[int],
    ) -> None:
        """Correct `spans` in place if the pieces of the `wrong` words differ from their text."""
        lengths = np.fromiter((len(_to_bytes(w)) for w in written), np.int64, len(written))
        offsets = np.cumsum(lengths) - lengths
        firsts = np.cumsum(counts) - counts
        # The offset of each word if all pieces before it were exact.
        assumed = np.append(0, spans[1])[firsts]
        for column in spans:
            column += np.repeat(offsets - assumed, counts)
        for i in wrong:
            tokens = slice(firsts[i], firsts[i] + counts[i])
            lead = "" if self._splitter.is_first(words[i]) else _LEAD
            # The model reports which part of its input each piece came from.
            proto = self._model.encode(lead + written[i], out_type="serialized_proto")
            num_lead = len(self._lead_ids) if lead else 0
            for column, aligned in zip(spans, surfaces(proto)[1:], strict=True):
                column[tokens] = np.array(aligned[num_lead:]) + (offsets[i] - len(lead))

    def _reads_as(self, ids: list[int], text: str) -> bool:
        try:
            return self._read(self._join(ids)) == _to_bytes(text)
        except DataError:
            return False

    def _spell(self, written: str) -> list[int]:
        ids: list[int] = []
        for index, run in enumerate(_ODD_RUN.split(written)):
            raw = _to_bytes(run)
            is_odd = index % 2 == 1
            run_ids = [] if is_odd else self._model.encode(run)
            ids += run_ids if self._join(run_ids) == raw else [self._byte_ids[b] for b in raw]
        return ids

    def _join(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._table.__getitem__, ids))

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

    def _check_pieces(self) -> None:
        if not self._model.is_control(BOS_ID):
            raise DataError(f"tokenizer id {BOS_ID} is not a control piece, train it with bos_id=1")
        unknown = self._model.unk_id()
        # Otherwise a space becomes three byte tokens that decode to U+2581 (Golf issue 897).
        if self._model.piece_to_id(_SPACE_MARK) == unknown:
            raise DataError(
                "tokenizer has no piece for a space alone (U+2581); train it on text with spaces"
            )
        for symbol in self.transform.symbols:
            if self._model.piece_to_id(symbol) == unknown:
                raise DataError(
                    f"transform {self.transform_name!r} needs a piece for U+{ord(symbol):04X}, "
                    "the tokenizer has none; train it with this transform or leave it out"
                )
        # Without the transform, each operator would count as three source bytes.
        reserved = range(unknown + 1, min(self._byte_ids))
        if not self.transform.symbols and self._model.piece_to_id("\ue001") in reserved:
            raise DataError(
                "tokenizer has pieces for case operators (U+E001) but no transform writes them; "
                "name the transform it was trained with (the lever caseops or a variant)"
            )


Tokenizer = SentencePieceTokenizer | ByteTokenizer


def open_tokenizer(content: bytes, transform: str = IDENTITY) -> Tokenizer:
    """The tokenizer in the bytes of its file; a damaged file is refused."""
    if not content.lstrip().startswith(b"{"):
        return SentencePieceTokenizer(content, transform)
    if transform != IDENTITY:
        raise DataError(f"transform {transform!r} does not work with bytes as tokens, leave it out")
    return ByteTokenizer(content)


def read_model(path: Path) -> bytes:
    """The bytes of a tokenizer file; a missing or huge file is refused."""
    try:
        if path.stat().st_size > MAX_MODEL_BYTES:
            raise DataError(f"{path}: over {MAX_MODEL_BYTES} bytes, not a tokenizer")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: tokenizer cannot be read: {error.strerror}") from error


def _to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
