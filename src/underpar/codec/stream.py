"""A compressor made of an artifact. Any bytes go in and come back.

Text that does not shrink is stored. Float probabilities are equal only on equal software, so the
file names the machine that wrote it. Another machine is refused unless the caller wants to try.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from underpar.codec.frame import MODE_NAMES, PLAIN, STORED, Frame, Header, is_plausible, read_frame
from underpar.codec.lanes import OnTokens, decode_documents, encode_documents, hash_step
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.errors import CodecError, DataError, one_line
from underpar.infer.predictor import Predictor

# One lane per this many tokens. More lanes are faster, but each begins without context.
TOKENS_PER_LANE = 2048
MAX_LANES = 64


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

    def compress(self, data: bytes, on_tokens: OnTokens | None = None) -> bytes:
        """`data` as a compressed file; it is decoded as a check before it is returned."""
        tokens = self.tokenizer.encode(data)
        num_lanes = int(np.clip(len(tokens) // TOKENS_PER_LANE, 1, MAX_LANES))
        documents = [piece for piece in np.array_split(tokens, num_lanes) if len(piece)]
        coded = b""
        if documents:
            coded = encode_documents(self.predictor, documents, num_lanes, on_tokens)
        header = Header(
            PLAIN,
            bytes.fromhex(self.identity)[:8],
            num_lanes,
            len(documents),
            len(data),
            hashlib.sha256(data).digest()[:8],
            fingerprint(self.predictor),
        )
        if len(coded) >= len(data) or not is_plausible(header, len(coded)):
            header, coded = replace(header, mode=STORED), data
        out = Frame(header, coded).to_bytes()
        if self.decompress(out) != data:
            raise CodecError("the decoder did not give the input back; nothing was written")
        return out

    def decompress(self, data: bytes, any_machine: bool = False) -> bytes:
        """The original bytes; with `any_machine` even if floats may differ on this machine."""
        frame = read_frame(data)
        header, payload = frame.header, frame.payload
        if header.mode == STORED:
            return self._checked(header, payload)
        if header.mode != PLAIN:
            raise CodecError(f"compressed file of mode {MODE_NAMES[header.mode]}: not known here")
        if header.artifact != bytes.fromhex(self.identity)[:8]:
            raise CodecError(
                f"this file was compressed with artifact {header.artifact.hex()}..., "
                f"not with {self.identity[:16]}...; give the artifact it was made with"
            )
        here = fingerprint(self.predictor)
        if header.machine != here and not any_machine:
            raise CodecError(
                f"this file was compressed on '{one_line(header.machine)}', here is '{here}': "
                "floats may differ; decompress there, or try with --any-machine (the checksum "
                "decides)"
            )
        pieces = decode_documents(
            self.predictor,
            payload,
            header.num_documents,
            header.num_lanes,
            # A text transform adds at most one operator per byte.
            max_tokens=2 * header.num_bytes,
        )
        # Decoded as one text, because a lane may end between an operator and its word.
        tokens = np.concatenate([np.array(p, dtype=np.int64) for p in pieces])
        try:
            return self._checked(header, self.tokenizer.decode(tokens))
        except DataError as error:
            raise CodecError(f"the file is damaged: {error}") from error

    def _checked(self, header: Header, raw: bytes) -> bytes:
        right = len(raw) == header.num_bytes
        if not right or hashlib.sha256(raw).digest()[:8] != header.checksum:
            raise CodecError("decompressed data differs from the original: the file is damaged")
        return raw


def code_documents(
    codec: Codec, documents: list[np.ndarray], on_tokens: OnTokens | None = None
) -> int:
    """Code documents (each with its BOS) and decode them again; returns the bits of the payload."""
    bodies = [doc[1:] for doc in documents]
    lanes = min(MAX_LANES, len(bodies))
    payload = encode_documents(codec.predictor, bodies, lanes, on_tokens)
    most = sum(len(body) for body in bodies)
    decoded = decode_documents(codec.predictor, payload, len(bodies), lanes, max_tokens=most)
    if any(body.tolist() != back for body, back in zip(bodies, decoded, strict=True)):
        raise CodecError("the decoder did not give the documents back")
    return 8 * len(payload)
