"""A compressor made of an artifact. Any bytes go in and come back.

Text that does not shrink is stored. Float probabilities are equal only on equal software, so the
file names the machine that wrote it. Another machine is refused unless the caller wants to try. A
file in exact mode names no machine: all machines have its probabilities.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from underpar.codec.adapted import Adaptation, decode_adapted, encode_adapted
from underpar.codec.exact import (
    DECODER_BYTES,
    decode_exact,
    encode_exact,
    lanes_bytes,
    lengths_of,
    with_ends,
    without_ends,
)
from underpar.codec.frame import (
    ADAPTED,
    EXACT,
    MAX_SEPARATOR_BYTES,
    PLAIN,
    STORED,
    Frame,
    Header,
    is_plausible,
    read_frame,
)
from underpar.codec.lanes import Bound, OnShare, decode_documents, encode_documents, hash_step
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.errors import CodecError, DataError, one_line
from underpar.infer.exact_predictor import ExactPredictor
from underpar.infer.predictor import Predictor

# One lane per this many tokens. More lanes are faster, but each begins without context.
TOKENS_PER_LANE = 2048
MAX_LANES = 64
# Documents that share a block of an indexed file: to read one of them, all are decoded.
INDEXED_LANES = 16
# Adapters need a longer text to learn from.
ADAPTED_CUT_TOKENS = 16_384


def fingerprint(predictor: Predictor) -> str:
    """What float results depend on: torch, GPU or instruction set, threads, and a step's result.

    Files of earlier versions lack the last two: they were coded with two threads.
    """
    device = predictor.device
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    else:
        kind = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__} {kind} {hash_step(predictor)}"


@dataclass(frozen=True)
class Codec:
    """A compressor made of an artifact. `identity` is the SHA-256 of its file, in hex."""

    predictor: Predictor
    tokenizer: Tokenizer
    identity: str
    open_adaptation: Callable[[], Adaptation] | None = None
    """How the artifact's recipe learns; None: it is not known here."""
    open_exact: Callable[[], ExactPredictor] | None = None
    """The same network in exact mode; None: it is not known here."""

    def compress(
        self,
        data: bytes,
        on_share: OnShare | None = None,
        *,
        separator: bytes = b"",
        adapt: bool = False,
        exact: bool = False,
        decoder_bytes: float = DECODER_BYTES,
        indexed: bool = False,
        verify: bool = True,
    ) -> bytes:
        """`data` as a compressed file; it is decoded as a check before it is returned.

        With a `separator` the parts between are documents of their own, which lanes code side by
        side. With `adapt` adapters learn each document. An `exact` file decodes on every machine
        that has `decoder_bytes` of memory for its lanes. An `indexed` file gives a document without
        the others. Without `verify` nothing is decoded, and the file says so.
        """
        if indexed and (adapt or not separator):
            why = "adapters go through a file from its start" if adapt else "give a separator"
            raise CodecError(f"an index is of documents that are coded without others: {why}")
        if exact and (adapt or indexed):
            raise CodecError("exact mode is of the frozen network and whole files: leave it out")
        if len(separator) > MAX_SEPARATOR_BYTES:
            raise CodecError(f"a separator of {len(separator)} bytes: expected at most 255")
        documents = self._documents(data, separator, adapt)
        adaptation = self._adaptation() if adapt and documents else None
        encoding = _shown(on_share, 0.0, 0.5 if verify else 1.0)
        payload, index, num_lanes, note = b"", b"", 1, ""
        if adaptation:
            payload = encode_adapted(adaptation, documents, encoding)
            num_lanes, note = adaptation.lanes_for(len(documents)), adaptation.digest
        elif documents and exact:
            # Cuts of one text are joined: lanes have cuts of their own.
            documents = documents if separator else [np.concatenate(documents)]
            sequences = with_ends(documents) if separator else documents
            payload, num_lanes = encode_exact(self._exact(), sequences, encoding, decoder_bytes)
        elif documents:
            num_lanes = min(INDEXED_LANES if indexed else MAX_LANES, len(documents))
            size = num_lanes if indexed else len(documents)
            blocks = [documents[i : i + size] for i in range(0, len(documents), size)]
            coded = [
                encode_documents(
                    self.predictor,
                    block,
                    num_lanes,
                    _shown(encoding, i / len(blocks), (i + 1) / len(blocks)),
                )
                for i, block in enumerate(blocks)
            ]
            payload = b"".join(coded)
            if indexed:
                checks = map(zlib.crc32, data.split(separator))
                numbers = [*map(len, coded), *checks]
                index = struct.pack(f"<{len(numbers)}I", *numbers)
        machine = ""
        if not exact:
            machine = fingerprint(adaptation.predictor if adaptation else self.predictor)
        header = Header(
            ADAPTED if adaptation else EXACT if exact else PLAIN,
            bytes.fromhex(self.identity)[:8],
            num_lanes,
            len(documents),
            len(data),
            hashlib.sha256(data).digest()[:8],
            machine,
            note,
            separator,
        )
        is_smaller = len(payload) + len(index) < len(data) and is_plausible(header, len(payload))
        if not documents or not (is_smaller or indexed):
            header, payload = replace(header, mode=STORED), data
        out = Frame(header, payload, index, verified=verify).to_bytes()
        if verify and self.decompress(out, on_share=_shown(on_share, 0.5, 1.0)) != data:
            raise CodecError("the decoder did not give the input back; nothing was written")
        return out

    def decompress(
        self,
        data: bytes,
        any_machine: bool = False,
        on_share: OnShare | None = None,
        document: int | None = None,
    ) -> bytes:
        """The original bytes; with `any_machine` even if floats may differ on this machine.

        With a `document`, a number from 0 on, that document of an indexed file alone.
        """
        frame = read_frame(data)
        header = frame.header
        if document is not None:
            return self._document(frame, document, any_machine)
        if header.mode == STORED:
            return self._checked(header, frame.payload)
        if header.mode == ADAPTED:
            adaptation = self._adaptation()
            self._check_origin(header, adaptation.predictor, any_machine)
            if header.note != adaptation.digest:
                raise CodecError(
                    f"this file was compressed with settings {one_line(header.note)}, the artifact "
                    f"says {adaptation.digest}: give the artifact it was made with"
                )
            num, bound = header.num_documents, self._bound(header)
            pieces = decode_adapted(adaptation, frame.payload, num, bound, on_share)
        elif header.mode == PLAIN:
            self._check_origin(header, self.predictor, any_machine)
            blocks = _blocks(frame)
            parts = enumerate(blocks)
            pieces = [
                piece
                for i, block in parts
                for piece in self._decode(
                    header, block, _shown(on_share, i / len(blocks), (i + 1) / len(blocks))
                )
            ]
        else:
            self._check_artifact(header)
            most = self._bound(header).most + header.num_documents
            targets = decode_exact(self._exact(), frame.payload, header.num_lanes, most, on_share)
            found = without_ends(targets) if header.separator else [targets]
            pieces = [part.tolist() for part in found]
        if header.separator:
            return self._checked(header, header.separator.join(map(self._text, pieces)))
        # Decoded as one text, because a lane may end between an operator and its word.
        return self._checked(header, self._text([token for piece in pieces for token in piece]))

    def decoder_bytes(self, frame: Frame) -> int:
        """Memory that the lanes of a file in exact mode may need; 0 in other modes."""
        if frame.header.mode != EXACT:
            return 0
        return lanes_bytes(self._exact(), lengths_of(frame.payload, frame.header.num_lanes))

    def _documents(self, data: bytes, separator: bytes, adapt: bool) -> list[np.ndarray]:
        """Tokens of the documents: parts between separators, or cuts of about equal length."""
        if separator and data:
            return [self.tokenizer.encode(part) for part in data.split(separator)]
        tokens = self.tokenizer.encode(data)
        size = ADAPTED_CUT_TOKENS if adapt else TOKENS_PER_LANE
        num_cuts = int(np.clip(len(tokens) // size, 1, MAX_LANES))
        return [piece for piece in np.array_split(tokens, num_cuts) if len(piece)]

    def _adaptation(self) -> Adaptation:
        if self.open_adaptation is None:
            raise CodecError("this model has learned already; adapt with the artifact it began as")
        return self.open_adaptation()

    def _exact(self) -> ExactPredictor:
        if self.open_exact is None:
            raise CodecError("this model has learned already; take the artifact it began as")
        return self.open_exact()

    def _check_artifact(self, header: Header) -> None:
        if header.artifact != bytes.fromhex(self.identity)[:8]:
            raise CodecError(
                f"this file was compressed with artifact {header.artifact.hex()}..., "
                f"not with {self.identity[:16]}...; give the artifact it was made with"
            )

    def _check_origin(self, header: Header, predictor: Predictor, any_machine: bool) -> None:
        self._check_artifact(header)
        here = fingerprint(predictor)
        if header.machine != here and not any_machine:
            raise CodecError(
                f"this file was compressed on '{one_line(header.machine)}', here is '{here}': "
                "floats may differ; decompress there, or try with --any-machine (the checksum "
                "decides)"
            )

    def _bound(self, header: Header) -> Bound:
        # A text transform adds at most one operator, of up to four bytes, per byte.
        sizes = np.array([max(1, len(piece)) for piece in self.tokenizer.pieces])
        return Bound(5 * header.num_bytes, sizes)

    def _decode(self, header: Header, block: Block, on_share: OnShare | None) -> list[list[int]]:
        if header.num_lanes > MAX_LANES:
            raise CodecError(f"compressed file of {header.num_lanes} lanes: damaged")
        payload, num, lanes = block.payload, len(block.documents), header.num_lanes
        return decode_documents(self.predictor, payload, num, lanes, self._bound(header), on_share)

    def _document(self, frame: Frame, number: int, any_machine: bool) -> bytes:
        header = frame.header
        if header.mode == ADAPTED:
            raise CodecError(
                "a document of an adapted file depends on those before it: decompress the whole "
                "file, or compress with --index and without --adapt"
            )
        if not frame.index:
            raise CodecError(
                "this file has no index: compress with --index, and --split or a data folder"
            )
        if not 0 <= number < header.num_documents:
            raise CodecError(f"document {number}: the file has {header.num_documents}, from 0 on")
        self._check_origin(header, self.predictor, any_machine)
        block = next(block for block in _blocks(frame) if number in block.documents)
        pieces = self._decode(header, block, None)
        raw = self._text(pieces[number - block.documents.start])
        if zlib.crc32(raw) != block.checks[number - block.documents.start]:
            raise CodecError("decompressed data differs from the original: the file is damaged")
        return raw

    def _text(self, tokens: Sequence[int]) -> bytes:
        try:
            return self.tokenizer.decode(np.array(tokens, dtype=np.int64))
        except DataError as error:
            raise CodecError(f"the file is damaged: {error}") from error

    def _checked(self, header: Header, raw: bytes) -> bytes:
        right = len(raw) == header.num_bytes
        if not right or hashlib.sha256(raw).digest()[:8] != header.checksum:
            raise CodecError("decompressed data differs from the original: the file is damaged")
        return raw


@dataclass(frozen=True)
class Block:
    """Documents that are coded together, without other documents."""

    documents: range
    payload: bytes
    checks: Sequence[int] = ()
    """CRC-32 of each document."""


def _blocks(frame: Frame) -> list[Block]:
    """The blocks of a plain file: one, or those of its index."""
    header, index = frame.header, frame.index
    num, size = header.num_documents, header.num_lanes
    if not index:
        return [Block(range(num), frame.payload)]
    starts = range(0, num, size)
    if len(index) != 4 * (len(starts) + num):
        raise CodecError(f"index of {len(index)} bytes for {num} documents: damaged")
    numbers = struct.unpack(f"<{len(index) // 4}I", index)
    lengths, checks = numbers[: len(starts)], numbers[len(starts) :]
    if sum(lengths) != len(frame.payload):
        raise CodecError("the index does not fit the payload: damaged")
    ends = np.cumsum(lengths).tolist()
    return [
        Block(
            range(start, min(start + size, num)),
            frame.payload[end - length : end],
            checks[start : start + size],
        )
        for start, length, end in zip(starts, lengths, ends, strict=True)
    ]


def _shown(on_share: OnShare | None, begin: float, end: float) -> OnShare | None:
    """Progress of a part of the work, from share `begin` to share `end` of the whole."""
    if on_share is None:
        return None
    return lambda share: on_share(begin + (end - begin) * share)


def code_documents(codec: Codec, documents: list[np.ndarray]) -> int:
    """Code documents (each with its BOS) and decode them again; returns the bits of the payload."""
    bodies = [doc[1:] for doc in documents]
    lanes = min(MAX_LANES, len(bodies))
    payload = encode_documents(codec.predictor, bodies, lanes)
    bound = Bound(sum(map(len, bodies)))
    _require_same(bodies, decode_documents(codec.predictor, payload, len(bodies), lanes, bound))
    return 8 * len(payload)


def code_first(adaptation: Adaptation, documents: list[np.ndarray], num_in_all: int) -> int:
    """The same with adapters, for the first documents of a text of `num_in_all`."""
    bodies = [doc[1:] for doc in documents]
    payload = encode_adapted(adaptation, bodies, num_in_all=num_in_all)
    bound = Bound(sum(map(len, bodies)))
    decoded = decode_adapted(adaptation, payload, len(bodies), bound, num_in_all=num_in_all)
    _require_same(bodies, decoded)
    return 8 * len(payload)


def _require_same(bodies: Sequence[np.ndarray], decoded: Sequence[Sequence[int]]) -> None:
    if any(body.tolist() != back for body, back in zip(bodies, decoded, strict=True)):
        raise CodecError("the decoder did not give the documents back")
