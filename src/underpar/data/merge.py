"""Data folders in parts: write each part from a stream of texts, on any machine, then merge them.

The split depends only on the hash of a text, so separately written parts use the same split.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from underpar import __version__
from underpar.data.build import BuildOptions
from underpar.data.folder import SPLITS, DataFolder, load_data
from underpar.data.folder_writer import FolderWriter, new_data_folder
from underpar.data.hold_out import by_hash
from underpar.data.prepare import Plan, Preparer
from underpar.data.shards import Columns, Shard
from underpar.data.sources.corpus import RawBatch, Tally
from underpar.data.tokens.tokenizer import read_model
from underpar.errors import DataError

BATCH_TEXTS = 256
BATCH_TOKENS = 1 << 20

Manifest = dict[str, Any]


def write_part(
    texts: Iterable[tuple[str, str]], out: Path, options: BuildOptions, overwrite: bool = False
) -> Manifest:
    """Write (source, text) pairs to the data folder `out`; either split may be empty.

    The texts of one source, such as a file, must be consecutive. `options` are those of
    `build_data`; they must name a tokenizer file and a fraction to hold out by hash.
    """
    if options.tokenizer is None or options.fraction is None:
        raise DataError("a part needs a tokenizer file and a fraction to hold out, give both")
    if options.development:
        raise DataError("a part keeps no development documents apart; build the folder whole")
    with new_data_folder(out, overwrite) as new:
        return _write_part(texts, new, options)


def _write_part(texts: Iterable[tuple[str, str]], out: Path, options: BuildOptions) -> Manifest:
    assert options.tokenizer is not None and options.fraction is not None
    content, hold_out = read_model(options.tokenizer), by_hash(options.fraction)
    preparer = Preparer(Plan(content, options.transform, options.reading, hold_out))
    tally = Tally()
    with FolderWriter(out, preparer.tokenizer, max_shared=None) as writer:
        for batch in _raw_batches(texts, options.reading.field):
            prepared = preparer.prepare(batch, "train")
            tally.add(prepared.tally)
            for split, columns in prepared.splits.items():
                writer.add(batch.path, split, columns)
    # No "reading" entry: the caller may have filtered texts, so the sources cannot be read again.
    return writer.write_manifest(
        {
            "tool": f"underpar {__version__}",
            "inputs": [
                {"path": source, "split": "train", "licence": options.licence, "documents": spans}
                for source, spans in writer.ranges.items()
            ],
            "split": hold_out.describe(),
            "tally": asdict(tally),
        }
    )


def _raw_batches(texts: Iterable[tuple[str, str]], field: str) -> Iterator[RawBatch]:
    seen: set[str] = set()
    for source, group in groupby(texts, key=itemgetter(0)):
        if source in seen:
            raise DataError(f"{source}: its texts are not consecutive, sort the texts by source")
        seen.add(source)
        first = 1
        while batch := list(islice(group, BATCH_TEXTS)):
            # JSON can carry a lone surrogate, so such a text is refused or repaired as in a file.
            records = [json.dumps({field: text}).encode() for _, text in batch]
            yield RawBatch(source, True, first, records)
            first += len(records)


def merge_folders(folders: Sequence[Path], out: Path, overwrite: bool = False) -> Manifest:
    """Write the documents of all folders, in order, to the data folder `out`; returns the manifest.

    All folders are checked in full before anything is written. A split may be empty in some folders
    but not in all. A training document of one folder must not be held out in another.
    """
    _refuse_repeated(folders, out)
    with new_data_folder(out, overwrite) as new:
        return _merge(folders, new)


def _merge(folders: Sequence[Path], out: Path) -> Manifest:
    # All are opened here and read later: it does not matter if one is replaced meanwhile.
    parts = [load_data(folder) for folder in folders]
    manifests = [part.manifest for part in parts]
    _refuse_different(folders, manifests)
    head = {"tool": f"underpar {__version__}", **_merge_heads(folders, manifests)}
    with FolderWriter(out, parts[0].tokenizer, max_shared=0) as writer:
        # Validation first, so that each training document can be checked against it.
        for split in reversed(SPLITS):
            for folder, part in zip(folders, parts, strict=True):
                for columns in _read_split(part, split):
                    writer.add(str(folder), split, columns)
    return writer.write_manifest(head)


def _refuse_repeated(folders: Sequence[Path], out: Path) -> None:
    if not folders:
        raise DataError("no data folders to merge, name at least one")
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise DataError(
                f"{folder} is named twice, its documents would count twice; name it once"
            )
        seen.add(folder.resolve())
    if out.resolve() in seen:
        raise DataError(f"{out} is an input and the output, choose another output folder")


def _refuse_different(folders: Sequence[Path], manifests: list[Manifest]) -> None:
    first = manifests[0]
    for folder, manifest in zip(folders, manifests, strict=True):
        identity, wanted = (m["tokenizer"]["identity"] for m in (manifest, first))
        if identity != wanted:
            raise DataError(
                f"{folder}: tokenizer is {identity:.16}, {folders[0]} has {wanted:.16}; "
                "merge folders with one tokenizer and transform"
            )
        if manifest.get("split") != first.get("split"):
            raise DataError(
                f"{folder}: split is {manifest.get('split')!r:.120}, {folders[0]} has "
                f"{first.get('split')!r:.120}; merge folders with one split rule"
            )
    for split in SPLITS:
        if not any(manifest[split]["documents"] for manifest in manifests):
            raise DataError(f"none of {len(folders)} folders has a {split} document, add one")


def _merge_heads(folders: Sequence[Path], manifests: list[Manifest]) -> Manifest:
    """Inputs of all folders, and what the manifests say alike: split, reading, tally."""
    first = manifests[0]
    head: Manifest = {"inputs": _merge_inputs(folders, manifests), "split": first.get("split")}
    is_whole = not any("dropped" in manifest for manifest in manifests)
    if (
        is_whole
        and "reading" in first
        and all(m.get("reading") == first["reading"] for m in manifests)
    ):
        head["reading"] = first["reading"]
    if all("tally" in manifest for manifest in manifests):
        tally = Tally()
        for folder, manifest in zip(folders, manifests, strict=True):
            try:
                tally.add(Tally(**manifest["tally"]))
            except TypeError as error:
                raise DataError(f"{folder}: tally does not count documents: {error}") from error
        head["tally"] = asdict(tally)
    return head


def _merge_inputs(folders: Sequence[Path], manifests: list[Manifest]) -> list[Manifest]:
    """All inputs, with their document ranges in the merged shards."""
    inputs: list[Manifest] = []
    owners: dict[tuple[str, object], Path] = {}
    begins = dict.fromkeys(SPLITS, 0)
    for folder, manifest in zip(folders, manifests, strict=True):
        try:
            rows = [_shifted(row, begins) for row in manifest["inputs"]]
            keys = [(row["path"], row.get("sha256")) for row in rows]
            owner = next((owners[key] for key in keys if key in owners), None)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{folder}: inputs are not those of a data folder: {error}") from error
        # For example two runs with different numbers of ranks: the text would be trained on twice.
        if owner is not None:
            raise DataError(
                f"{folder} and {owner} share an input; give all inputs to one 'underpar data build'"
            )
        owners.update(dict.fromkeys(keys, folder))
        inputs += rows
        begins = {split: begin + manifest[split]["documents"] for split, begin in begins.items()}
    return inputs


def _shifted(row: Manifest, begins: dict[str, int]) -> Manifest:
    spans = {
        split: [begins[split] + first, begins[split] + end]
        for split, (first, end) in row["documents"].items()
    }
    return {**row, "documents": spans}


def _read_split(part: DataFolder, split: str) -> Iterator[Columns]:
    shard = part.train if split == "train" else part.val
    sidecar = part.sidecar if split == "val" else None
    tokenizer = part.tokenizer
    for first, last in _batches(shard):
        starts = shard.starts[first:last]
        end = shard.starts[last] if last < shard.num_documents else shard.num_tokens
        tokens = shard.tokens[starts[0] : end]
        by_table = tokenizer.token_bytes[tokens]
        counted = np.add.reduceat(by_table, starts - starts[0], dtype=np.int64)
        doc_bytes = shard.doc_bytes[first:last]
        source_bytes = by_table if sidecar is None else sidecar[starts[0] : end].astype(np.int32)
        yield Columns(
            tokens=tokens,
            source_bytes=source_bytes if split == "val" else None,
            counts=np.diff(starts, append=end),
            doc_bytes=doc_bytes,
            doc_hashes=shard.doc_hashes[first:last],
            flags=shard.flags[first:last],
            num_off_table=int(np.count_nonzero(counted != doc_bytes)),
        )


def _batches(shard: Shard) -> Iterator[tuple[int, int]]:
    """Ranges of documents of about `BATCH_TOKENS` tokens; the last document may go over it."""
    first = 0
    while first < shard.num_documents:
        last = int(np.searchsorted(shard.starts, shard.starts[first] + BATCH_TOKENS))
        yield first, last
        first = last
