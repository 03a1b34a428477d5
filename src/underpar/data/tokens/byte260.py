"""Bytes as tokens: the published byte260 vocabulary (PR 1104), four control ids and 256 bytes."""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from underpar.data.tokens.words import Pieces
from underpar.data.transforms import Identity
from underpar.errors import DataError
from underpar.schema import BYTE_IDS
from underpar.seams import BOS_ID

VOCAB_SIZE = BYTE_IDS
FIRST_BYTE_ID = 4

_ABOUT = {
    "tokenizer_type": "pure_byte",
    "pad_id": 0,
    "bos_id": BOS_ID,
    "eos_id": 2,
    "unk_id": 3,
    "byte_offset": FIRST_BYTE_ID,
    "byte_count": 256,
    "vocab_size": VOCAB_SIZE,
}
CONTENT = (json.dumps(_ABOUT, indent=2) + "\n").encode()


class ByteTokenizer:
    """Each byte is a token: no training, no loss."""

    kind = "bytes"
    bos_id = BOS_ID
    vocab_size = VOCAB_SIZE
    lossless = True
    transform_name = "identity"

    def __init__(self, content: bytes = CONTENT) -> None:
        try:
            about = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not a byte tokenizer: {error}") from error
        if not isinstance(about, dict) or about.get("tokenizer_type") != "pure_byte":
            raise DataError('not a byte tokenizer: "tokenizer_type" must be "pure_byte"')
        wrong = [key for key, value in _ABOUT.items() if about.get(key, value) != value]
        if wrong:
            raise DataError(
                f"byte tokenizer has {wrong[0]} = {about[wrong[0]]!r:.40}, "
                f"expected {_ABOUT[wrong[0]]}"
            )
        # Files may be formatted differently. The canonical content gives one identity.
        self.content = CONTENT
        self.identity = hashlib.sha256(CONTENT).hexdigest()
        self.transform = Identity()
        is_byte = np.arange(VOCAB_SIZE) >= FIRST_BYTE_ID
        self.token_bytes: npt.NDArray[np.int32] = is_byte.astype(np.int32)

    def encode(self, data: bytes) -> npt.NDArray[np.int32]:
        """Ids of any bytes, without BOS."""
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32) + FIRST_BYTE_ID

    def encode_texts(self, texts: Sequence[str]) -> Pieces:
        """Tokens of each text, BOS first, with the source bytes of each token."""
        raws = [text.encode("utf-8", "surrogateescape") for text in texts]
        lengths = np.array([len(raw) for raw in raws], dtype=np.int64)
        tokens = np.insert(self.encode(b"".join(raws)), np.cumsum(lengths) - lengths, BOS_ID)
        return Pieces(
            tokens=tokens,
            source_bytes=self.token_bytes[tokens],
            counts=lengths + 1,
            changed=np.zeros(len(raws), dtype=bool),
        )

    def written(self, ids: npt.ArrayLike) -> bytes:
        """The bytes of the ids; control ids have none."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and not 0 <= array.min() <= array.max() < VOCAB_SIZE:
            raise DataError(
                f"token ids span {array.min()}..{array.max()}, expected 0..{VOCAB_SIZE - 1}"
            )
        return (array[array >= FIRST_BYTE_ID] - FIRST_BYTE_ID).astype(np.uint8).tobytes()

    @property
    def pieces(self) -> list[bytes]:
        """What each id stands for, as `written`."""
        return [self.written([token]) for token in range(VOCAB_SIZE)]

    decode = written
