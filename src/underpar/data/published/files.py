"""Published FineWeb token files of Parameter Golf: find them, open them, check them.

`value_files` describes the format of one file. A split is one stream of tokens, cut into numbered
files `fineweb_val_000000.bin` and so on. A document is [BOS] + tokens without EOS, and may straddle
two files. A sidecar, `fineweb_val_bytes_000000.bin`, has one entry per token of the token file with
the same number: the source bytes of that token.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.data.value_files import open_values
from underpar.errors import DataError
from underpar.seams import BOS_ID

PUBLISHED_SHARD_TOKENS = 100_000_000
SPLITS = ("train", "val")
# Ids that must not occur in text: there is no padding and no EOS, and byte fallback has no unknown.
SPECIAL_IDS = {0: "PAD", 2: "EOS", 3: "UNK"}
# Targets and UTF-8 bytes of the whole validation set of 50,000 documents. Targets are all tokens
# except the first. byte260 is computed: one token per byte and one BOS per document.
KNOWN_VAL = {
    "sp1024": (62_021_845, 151_080_891),
    "sp8192": (40_540_802, 151_080_891),
    "caseops": (47_853_343, 151_080_645),
    "byte260": (151_130_644, 151_080_645),
}

_TOKEN_FILE = re.compile(r"fineweb_(train|val)_([0-9]{6})\.bin")

CHUNK_VALUES = 1 << 22


def open_published(path: Path, vocab_size: int) -> npt.NDArray[np.uint16]:
    """Map the token ids of one file; refuse ids outside the vocabulary."""
    tokens = open_values(path)
    for begin, chunk in _chunks(tokens):
        if int(chunk.max()) >= vocab_size:
            at = int(np.argmax(chunk >= vocab_size))
            raise DataError(
                f"{path}: token {begin + at} is id {chunk[at]}, the tokenizer has {vocab_size} ids"
            )
    return tokens


def refuse_special_ids(path: Path, tokens: npt.NDArray[np.uint16]) -> None:
    """Refuse PAD, EOS and UNK among the tokens: the text of an UNK is lost."""
    for begin, chunk in _chunks(tokens):
        special = np.isin(chunk, list(SPECIAL_IDS))
        if special.any():
            at = int(np.argmax(special))
            raise DataError(
                f"{path}: token {begin + at} is {SPECIAL_IDS[int(chunk[at])]}, which no document "
                "has; encode with byte fallback and without padding or EOS"
            )


def _chunks(values: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    for begin in range(0, len(values), CHUNK_VALUES):
        yield begin, values[begin : begin + CHUNK_VALUES]


def split_files(folder: Path, split: str) -> list[Path]:
    """Token files of "train" or "val", in order; sidecars are left out, a gap is refused."""
    if split not in SPLITS:
        raise DataError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
    # The glob of all published readers; it also matches the sidecars.
    matches = sorted(folder.glob(f"fineweb_{split}_*.bin"))
    files = [file for file in matches if "_bytes_" not in file.name]
    for file in files:
        if not _TOKEN_FILE.fullmatch(file.name):
            raise DataError(f"{file}: name is not fineweb_{split}_ and six digits; move it away")
    for index in range(max(1, len(files))):
        expected = folder / f"fineweb_{split}_{index:06d}.bin"
        if expected not in files:
            raise DataError(f"{expected} is missing; run 'underpar data fetch NAME --out {folder}'")
    return files


def sidecar_of(path: Path) -> Path:
    """The path of the byte sidecar of a token file, which may not exist."""
    match = _TOKEN_FILE.fullmatch(path.name)
    if match is None:
        raise DataError(f"{path}: not the name of a token file, such as fineweb_val_000000.bin")
    return path.with_name(f"fineweb_{match[1]}_bytes_{match[2]}.bin")


def open_sidecar(
    token_file: Path, tokens: npt.NDArray[np.uint16], bos_id: int = BOS_ID
) -> npt.NDArray[np.uint16] | None:
    """Source bytes of each of `tokens`, the tokens of `token_file`; None without a sidecar."""
    path = sidecar_of(token_file)
    # lexists: a broken link is an unreadable sidecar, not a missing one.
    if not os.path.lexists(path):
        return None
    source_bytes = open_values(path)
    if len(source_bytes) != len(tokens):
        raise DataError(f"{path}: {len(source_bytes)} entries for {len(tokens)} tokens")
    wrong = np.flatnonzero((tokens == bos_id) & (source_bytes != 0))
    if wrong.size:
        raise DataError(
            f"{path}: the BOS at token {wrong[0]} has {source_bytes[wrong[0]]} bytes, expected 0"
        )
    return source_bytes


def check_known_val(name: str, num_tokens: int, num_bytes: int) -> None:
    """Refuse a validation set without exactly the tokens and bytes of the published set."""
    if name not in KNOWN_VAL:
        raise DataError(f"no published validation set {name!r}; known: {', '.join(KNOWN_VAL)}")
    known_targets, known_bytes = KNOWN_VAL[name]
    known_tokens = known_targets + 1
    if num_tokens != known_tokens:
        reason = (
            "it looks like a partial validation set, take all 50,000 documents"
            if num_tokens < known_tokens
            else "it is another export"
        )
        raise DataError(
            f"{name} validation has {num_tokens:,} tokens, the published set {known_tokens:,}: "
            f"{reason}"
        )
    if num_bytes != known_bytes:
        raise DataError(
            f"{name} validation has {num_bytes:,} bytes, the published set {known_bytes:,}: its "
            "tokens are all there, so the bytes of some are wrong or its sidecar is partial"
        )
