"""The compressed file: a checked header, then the payload. Any bytes go in and come back.

Layout, little-endian: magic "UPZ1", u8 method (0 stored, 1 coded), 8 bytes of the artifact's
SHA-256, u16 lanes, u32 documents, u64 raw length, 8 bytes of the raw data's SHA-256, u8 and text of
the machine's fingerprint, u32 CRC-32 of the header, then the payload.

Text that does not shrink is stored. Float probabilities are equal only on equal software, so the
file names the machine that wrote it. Another machine is refused unless the caller wants to try.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from underpar.codec.lanes import OnTokens, decode_documents, encode_documents, hash_step
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.errors import CodecError, DataError
from underpar.infer.predictor import Predictor

MAGIC = b"UPZ1"
STORED, CODED = 0, 1
FIXED = struct.Struct("<4sB8sHIQ8sB")

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
class Header:
    """The facts that a decoder needs before the first token."""

    method: int
    artifact: bytes
    num_lanes: int
    num_documents: int
    num_bytes: int
    checksum: bytes
    machine: str

    def to_bytes(self) -> bytes:
        """The header with its CRC."""
        machine = self.machine.encode("ascii")
        fixed = FIXED.pack(
            MAGIC,
            self.method,
            self.artifact,
            self.num_lanes,
            self.num_documents,
            self.num_bytes,
            self.checksum,
            len(machine),
        )
        return fixed + machine + struct.pack("<I", zlib.crc32(fixed + machine))


def read_header(data: bytes) -> tuple[Header, bytes]:
    """Header and payload; other or damaged files are refused."""
    if len(data) < FIXED.size + 4 or data[:4] != MAGIC:
        raise CodecError("not a file of 'underpar compress' (wrong magic)")
    _, method, artifact, lanes, documents, num_bytes, checksum, length = FIXED.unpack_from(data)
    end = FIXED.size + length
    if len(data) < end + 4 or struct.unpack_from("<I", data, end)[0] != zlib.crc32(data[:end]):
        raise CodecError("compressed file's header is damaged or cut short")
    machine = data[FIXED.size : end].decode("ascii", "replace")
    header = Header(method, artifact, lanes, documents, num_bytes, checksum, machine)
    payload = data[end + 4 :]
    # One document per lane, none of them empty.
    plausible = 1 <= documents <= lanes <= MAX_LANES and documents <= num_bytes
    if method not in (STORED, CODED) or (method == CODED and not plausible):
        raise CodecError("compressed file's header makes no sense: damaged")
    return header, payload


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
        stored = not documents or len(coded) >= len(data)
        header = Header(
            STORED if stored else CODED,
            bytes.fromhex(self.identity)[:8],
            num_lanes,
            len(documents),
            len(data),
            hashlib.sha256(data).digest()[:8],
            fingerprint(self.predictor),
        )
        out = header.to_bytes() + (data if stored else coded)
        if self.decompress(out) != data:
            raise CodecError("the decoder did not give the input back; nothing was written")
        return out

    def decompress(self, data: bytes, any_machine: bool = False) -> bytes:
        """The original bytes; with `any_machine` even if floats may differ on this machine."""
        header, payload = read_header(data)
        if header.method == STORED:
            return self._checked(header, payload)
        if header.artifact != bytes.fromhex(self.identity)[:8]:
            raise CodecError(
                f"this file was compressed with artifact {header.artifact.hex()}..., "
                f"not with {self.identity[:16]}...; give the artifact it was made with"
            )
        here = fingerprint(self.predictor)
        if header.machine != here and not any_machine:
            raise CodecError(
                f"this file was compressed on '{header.machine}', here is '{here}': floats may "
                "differ; decompress there, or try with --any-machine (the checksum decides)"
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
