"""Write published FineWeb token files, with or without byte sidecars, document by document."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from underpar.data.published.export_manifest import SplitStats
from underpar.data.published.files import PUBLISHED_SHARD_TOKENS, SPECIAL_IDS, SPLITS
from underpar.data.value_writer import MAX_FILE_VALUES, ValueSeries, checked_values, part_of
from underpar.errors import DataError
from underpar.seams import BOS_ID

# The number of values of an unsigned 16-bit entry.
MAX_VOCAB_SIZE = 1 << 16


class PublishedWriter:
    """Write one split document by document; after an error none of its files appear.

    Memory: one document. Values are written to temporary files next to the targets.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        vocab_size: int,
        shard_tokens: int = PUBLISHED_SHARD_TOKENS,
        *,
        sidecar: bool = False,
    ) -> None:
        if split not in SPLITS:
            raise DataError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
        if not BOS_ID < vocab_size <= MAX_VOCAB_SIZE:
            raise DataError(
                f"vocab_size is {vocab_size}, expected {BOS_ID + 1} to {MAX_VOCAB_SIZE}: "
                "published files store 16-bit ids"
            )
        if not 0 < shard_tokens <= MAX_FILE_VALUES:
            raise DataError(f"shard_tokens is {shard_tokens}, expected 1 to {MAX_FILE_VALUES}")
        self.num_documents = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self._folder = folder
        self._split = split
        self._vocab_size = vocab_size
        self._refuse_existing()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: cannot be a folder: {error.strerror}") from error
        # Files of a killed export.
        for stale in folder.glob(f".fineweb_{split}_*.bin.part"):
            stale.unlink()
        self._tokens = self._series(split, shard_tokens)
        self._sidecar = self._series(f"{split}_bytes", shard_tokens) if sidecar else None

    def _series(self, family: str, shard_tokens: int) -> "ValueSeries":
        return ValueSeries(self._folder, f"fineweb_{family}_{{:06d}}.bin", shard_tokens)

    def __enter__(self) -> "PublishedWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            for series in self._all_series():
                series.discard()

    def stats(self) -> SplitStats:
        """Documents, tokens and files so far."""
        return SplitStats(self.num_documents, self.num_tokens, len(self._tokens.paths))

    def add(self, tokens: npt.ArrayLike, source_bytes: npt.ArrayLike | None = None) -> None:
        """Append a document, BOS first; with a sidecar also the source bytes per token, 0 for BOS.

        Nothing of a refused document is written.
        """
        where = f"document {self.num_documents}"
        if (source_bytes is not None) != (self._sidecar is not None):
            raise DataError(
                f"{where}: a sidecar needs the source bytes of each token"
                if source_bytes is None
                else f"{where}: source bytes are given without a sidecar, leave them out"
            )
        ids = checked_values(tokens, self._vocab_size, f"{where}: token")
        _check_framing(ids, where)
        if self._sidecar is not None:
            # Checked before the cast to 16 bits, which would wrap silently.
            counts = checked_values(source_bytes, 1 << 16, f"{where}: source bytes of token")
            if len(counts) != len(ids) or counts[0] != 0:
                raise DataError(
                    f"{where}: sidecar has {len(counts)} entries for {len(ids)} tokens, the first "
                    f"entry is {counts[0]}; expected one entry per token and 0 for BOS"
                )
            self._sidecar.write(counts)
            self.num_bytes += int(counts.sum(dtype=np.int64))
        self._tokens.write(ids)
        self.num_documents += 1
        self.num_tokens += len(ids)

    def _all_series(self) -> list["ValueSeries"]:
        return [self._tokens] if self._sidecar is None else [self._sidecar, self._tokens]

    def _refuse_existing(self) -> None:
        # Two exports in one folder could put validation documents into training.
        existing = sorted(self._folder.glob(f"fineweb_{self._split}_*.bin"))
        if existing:
            raise DataError(f"{existing[0]} exists; export to a folder without {self._split} files")

    def _publish(self) -> None:
        for series in self._all_series():
            series.close()
        self._refuse_existing()
        renamed: list[Path] = []
        try:
            # The first token file last: without it, readers refuse the files of a killed export.
            for series in self._all_series():
                for path in reversed(series.paths):
                    renamed.append(path)
                    os.replace(part_of(path), path)
        except BaseException:
            for path in renamed:
                path.unlink(missing_ok=True)
            raise


def _check_framing(ids: npt.NDArray[Any], where: str) -> None:
    if ids[0] != BOS_ID or np.count_nonzero(ids == BOS_ID) != 1:
        raise DataError(f"{where}: BOS ({BOS_ID}) must be its first token and no other")
    special = np.flatnonzero(np.isin(ids, list(SPECIAL_IDS)))
    if special.size:
        raise DataError(
            f"{where}: token {special[0]} is {SPECIAL_IDS[int(ids[special[0]])]}, which no text "
            "has; use a tokenizer with byte fallback"
        )
