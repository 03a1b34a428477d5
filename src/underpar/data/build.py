"""Build a data folder: train or open a tokenizer, split by document, write the shards."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from underpar import __version__
from underpar.data.copies import Drops, find_drops
from underpar.data.folder import TOKENIZER_NAME, hash_file, load_data
from underpar.data.folder_writer import FolderWriter, new_data_folder
from underpar.data.hold_out import (
    DEVELOPMENT,
    VAL,
    HoldOut,
    Source,
    choose_hold_out,
    hold_out_first,
    labelled_documents,
    read_batches,
)
from underpar.data.prepare import Job, Plan, prepare_all, without_repeats
from underpar.data.sources.corpus import (
    Inputs,
    Reading,
    Tally,
    list_inputs,
)
from underpar.data.tokens import byte260
from underpar.data.tokens.sample import SAMPLE_BYTES, sample_by_hash
from underpar.data.tokens.tokenizer import Tokenizer, open_tokenizer, read_model
from underpar.data.tokens.train_bpe import train_tokenizer
from underpar.data.transforms import IDENTITY
from underpar.data.workers import workers_for
from underpar.errors import DataError

# How many skipped files the manifest names.
NUM_SKIPPED_NAMES = 10

Progress = Callable[[str, int], None]
# The share of documents held out by hash, or the files with the held-out documents.
Holdout = float | Sequence[Path]


@dataclass(frozen=True)
class BuildOptions:
    """How text becomes tokens. `vocab_size` may be None if a tokenizer file is given."""

    vocab_size: int | None
    holdout: Holdout = 0.1
    tokenizer: Path | None = None
    kind: str = "bpe"
    transform: str = IDENTITY
    cross_words: bool = False
    reading: Reading = field(default_factory=Reading)
    licence: str = "not stated"
    workers: int = 1
    # Leave out training documents that are this similar to a held-out one; None: keep all.
    drop_near: float | None = None
    # Hold out the first so many documents of the input, instead of a share; 0: do not.
    val_docs: int = 0
    # Keep this share of the training documents apart, in a second data folder; 0: none.
    development: float = 0.0

    def __post_init__(self) -> None:
        if self.val_docs < 0:
            raise DataError(f"val_docs is {self.val_docs}, expected a number of documents, or 0")
        if self.val_docs and not isinstance(self.holdout, float):
            raise DataError("val_docs and files each say what is held out; give one")
        if isinstance(self.holdout, int | float) and not 0 < self.holdout < 1:
            raise DataError(f"holdout is {self.holdout}, expected a fraction between 0 and 1")
        if self.kind not in ("bpe", "bytes"):
            raise DataError(f"tokenizer kind is {self.kind!r}, expected 'bpe' or 'bytes'")
        if self.workers < 1:
            raise DataError(f"workers is {self.workers}, expected at least 1")
        if not 0 <= self.development < 1:
            raise DataError(
                f"development is {self.development}, expected 0 or a fraction between 0 and 1"
            )
        if self.drop_near is not None and not 0 < self.drop_near <= 1:
            raise DataError(f"drop_near is {self.drop_near}, expected above 0 and at most 1")

    @property
    def fraction(self) -> float | None:
        """Share held out by hash; None if files or places decide."""
        return self.holdout if isinstance(self.holdout, float) and not self.val_docs else None


def build_data(
    inputs: Sequence[Path],
    out: Path,
    options: BuildOptions,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build the data folder `out` and return its manifest; equal inputs give equal bytes.

    Only training documents train the tokenizer. `progress` is called with the stage ("tokenizer" or
    "encode") and the number of documents done. An old data folder is replaced if `overwrite` says
    so, at the end. With `options.development`, so is the folder that prices those documents.
    """
    report = progress or (lambda stage, num_documents: None)
    with ExitStack() as stack:
        names = {VAL: out} | ({DEVELOPMENT: development_of(out)} if options.development else {})
        folders = {
            priced: stack.enter_context(new_data_folder(folder, overwrite))
            for priced, folder in names.items()
        }
        manifests = _build_folders(inputs, folders, options, report)
        if options.drop_near is not None:
            drops = {p: _drops_of(folder, options, report) for p, folder in folders.items()}
            if any(drops.values()):
                # Again from the start: what is dropped must not train the tokenizer.
                for folder in folders.values():
                    for file in folder.iterdir():
                        file.unlink()
                manifests = _build_folders(inputs, folders, options, report, drops)
        return manifests[VAL]


def development_of(folder: Path) -> Path:
    """The data folder beside `folder` that prices its development documents."""
    return folder.with_name(f"{folder.name}-{DEVELOPMENT}")


def _build_folders(
    inputs: Sequence[Path],
    folders: Mapping[str, Path],
    options: BuildOptions,
    report: Progress,
    drops: Mapping[str, Drops] | None = None,
) -> dict[str, dict[str, Any]]:
    """The manifest of each folder. All have one tokenizer and the same training documents."""
    manifests = {}
    # What repeats priced text of either folder is left out of both.
    training = frozenset[bytes]().union(*(d.training for d in (drops or {}).values()))
    for priced, folder in folders.items():
        left_out = replace(drops[priced], training=training) if drops else None
        if priced != VAL:
            options = replace(options, tokenizer=folders[VAL] / TOKENIZER_NAME)
        manifests[priced] = _build(inputs, folder, options, report, priced, left_out)
    return manifests


def _drops_of(folder: Path, options: BuildOptions, report: Progress) -> Drops:
    assert options.drop_near is not None
    data = load_data(folder, verify=False, refuse_shared=False)
    workers = min(options.workers, workers_for(data.train.num_bytes))
    return find_drops(
        data, options.drop_near, workers, lambda done: report("near duplicates", done)
    )


def _build(
    inputs: Sequence[Path],
    out: Path,
    options: BuildOptions,
    report: Progress,
    priced: str,
    drops: Drops | None,
) -> dict[str, Any]:
    groups = _list_groups(inputs, options)
    sources = _describe_inputs(groups, options)
    if options.val_docs:
        reading = options.reading
        hold_out, sources = hold_out_first(sources, options.val_docs, reading)
    else:
        hold_out, reading = choose_hold_out(sources, options.fraction, options.reading)
    hold_out = replace(
        hold_out, development=options.development, prices_development=priced == DEVELOPMENT
    )
    if drops:
        hold_out = replace(hold_out, dropped=drops.training, dropped_val=drops.held_out, once=True)
    content = _tokenizer_content(sources, hold_out, replace(options, reading=reading), report)
    tokenizer = open_tokenizer(content, options.transform)
    _check_vocab_size(tokenizer, options)
    plan = Plan(content, options.transform, reading, hold_out)
    tally, seen = Tally(), set[bytes]()
    # Equal documents have equal hashes and thus one split. Only files can put a text on both sides,
    # where it is dropped if it may be.
    may_share = options.fraction is not None or options.drop_near is not None
    with FolderWriter(out, tokenizer, max_shared=None if may_share else 0) as writer:
        jobs = _jobs(sources, reading.field)
        for (batch, _), prepared in prepare_all(plan, jobs, options.workers):
            tally.add(prepared.tally)
            for split, columns in prepared.splits.items():
                if split == "val" and hold_out.once:
                    columns = without_repeats(columns, seen, tokenizer)
                if columns.counts.size:
                    writer.add(batch.path, split, columns)
            report("encode", tally.documents)
        _refuse_empty_split(writer, tally, options, priced)
    return writer.write_manifest(
        {
            "tool": f"underpar {__version__}",
            "inputs": [{**s, "documents": writer.ranges.get(s["path"], {})} for s in sources],
            **_describe_skipped(groups),
            "split": hold_out.describe(),
            "reading": reading.describe(),
            "tally": asdict(tally),
            **_describe_drops(drops, options),
        }
    )


def _describe_drops(drops: Drops | None, options: BuildOptions) -> dict[str, Any]:
    if drops is None:
        return {}
    hashes = {
        split: sorted(digest.hex() for digest in digests)
        for split, digests in (("train", drops.training), ("val", drops.held_out))
    }
    return {"dropped": {"similarity": options.drop_near, **hashes}}


def _list_groups(inputs: Sequence[Path], options: BuildOptions) -> dict[str, Inputs]:
    if isinstance(options.holdout, float):
        return {"train": list_inputs(inputs)}
    # Validation first, so that each training document can be checked against it.
    return {"val": list_inputs(options.holdout), "train": list_inputs(inputs)}


def _describe_inputs(groups: dict[str, Inputs], options: BuildOptions) -> list[Source]:
    return [
        {
            "path": str(file),
            "split": split,
            "bytes": file.stat().st_size,
            "sha256": hash_file(file),
            "licence": options.licence,
        }
        for split, group in groups.items()
        for file in group.files
    ]


def _describe_skipped(groups: dict[str, Inputs]) -> dict[str, Any]:
    """What the manifest says about files that were not read; nothing if all were."""
    skipped = {file: why for group in groups.values() for file, why in group.skipped.items()}
    if not skipped:
        return {}
    # Hidden files last: nobody misses them.
    names = sorted(skipped, key=lambda file: skipped[file] == "hidden")
    return {
        "skipped": {
            "files": len(skipped),
            "kinds": dict(Counter(skipped.values()).most_common()),
            "first": [str(file) for file in names[:NUM_SKIPPED_NAMES]],
        }
    }


def _tokenizer_content(
    sources: list[Source], hold_out: HoldOut, options: BuildOptions, report: Progress
) -> bytes:
    if options.tokenizer is not None:
        return read_model(options.tokenizer)
    if options.kind == "bytes":
        return byte260.CONTENT
    if options.vocab_size is None:
        raise DataError("vocab_size is needed to train a tokenizer, set it or give a tokenizer")

    def training_documents() -> Iterator[tuple[bytes, str]]:
        labelled = labelled_documents(sources, hold_out, options.reading)
        for number, (split, digest, document) in enumerate(labelled, start=1):
            report("tokenizer", number)
            if split == "train":
                yield digest, document.text

    texts = sample_by_hash(training_documents(), SAMPLE_BYTES)
    return train_tokenizer(texts, options.vocab_size, options.transform, options.cross_words)


def _check_vocab_size(tokenizer: Tokenizer, options: BuildOptions) -> None:
    if options.vocab_size is not None and tokenizer.vocab_size != options.vocab_size:
        raise DataError(
            f"{options.tokenizer or options.kind}: tokenizer has {tokenizer.vocab_size} pieces, "
            f"vocab_size says {options.vocab_size}"
        )


def _jobs(sources: list[Source], text_field: str) -> Iterator[Job]:
    for source in sources:
        yield from read_batches(source, text_field)


def _refuse_empty_split(
    writer: FolderWriter, tally: Tally, options: BuildOptions, priced: str
) -> None:
    for split in writer.empty_splits:
        name, value = "holdout", options.fraction
        if options.val_docs:
            name, value = "val_docs", options.val_docs
        if split == "val" and priced == DEVELOPMENT:
            split, name, value = DEVELOPMENT, DEVELOPMENT, options.development
        raise DataError(
            f"none of {tally.documents} documents falls into {split} "
            f"with {name} {value}: change {name} or add text"
        )
