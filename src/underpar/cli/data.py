"""Commands for data: build, inspect, audit, fetch, import, export, merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from underpar.cli.console import OUT, open_progress, show_json, show_table
from underpar.cli.options import Json, Set, app, show_summary
from underpar.core.words import count_text
from underpar.errors import DataError, one_line

if TYPE_CHECKING:
    from underpar.core.fields import Fields

data_app = typer.Typer(
    help="Turn text into tokens: build, inspect, audit, fetch, import, export, merge.",
    no_args_is_help=True,
)
app.add_typer(data_app, name="data")

DataFolderPath = Annotated[Path, typer.Argument(help="A folder made by 'underpar data build'.")]
Licence = Annotated[str, typer.Option(help="Licence of the text, kept in the manifest.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace the data folder at --out, once the new one is whole."
    ),
]


@data_app.command("build")
def data_build(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Files or folders: text, .jsonl (plain, .xz, .gz, .zst), .parquet"),
    ],
    out: Annotated[Path, typer.Option(help="The data folder to write.")],
    recipe: Annotated[
        str,
        typer.Option(help="Recipe that sets vocabulary size, text transform and hold-out share."),
    ] = "demo",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer file instead of training one.")
    ] = None,
    val: Annotated[
        list[Path] | None,
        typer.Option(help="Hold out the text of these files instead of a share by hash."),
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(help="Share of the documents to hold out, instead of the recipe's."),
    ] = None,
    val_docs: Annotated[
        int,
        typer.Option(help="Hold out the first so many documents, as the published rebuild does."),
    ] = 0,
    split_documents: Annotated[
        int,
        typer.Option(
            help="Cut longer documents into pieces of at most so many characters, each a document."
        ),
    ] = 0,
    drop_near: Annotated[
        float | None,
        typer.Option(
            help="Leave out training documents that share so much with a held-out one, such as 0.7."
        ),
    ] = None,
    development: Annotated[
        float,
        typer.Option(
            help="Keep this share of the training documents apart, to make choices on: 0.1."
        ),
    ] = 0.0,
    field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    bad_input: Annotated[
        str, typer.Option(help="refuse or repair: invalid UTF-8, lone surrogates, empty texts.")
    ] = "refuse",
    licence: Licence = "not stated",
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core.")] = 0,
    overwrite: Overwrite = False,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Train a lossless tokenizer and write token shards; documents are held out by their hash.

    \b
    underpar data build my-texts --out data
    underpar data build novel.txt --out data --holdout 0.05
    underpar data build corpus.jsonl.xz --out data --recipe pr2014
    underpar data build more.parquet --out more --tokenizer data/tokenizer.model --field content
    underpar data build my-texts --out data --development 0.1

    The same documents are held out on every machine, because their hash decides. Of fewer than 20
    documents, such as one novel, the ends are held out. The folder is written beside its place and
    moved there when it is whole. --development also writes OUT-development: the same tokenizer and
    training documents, and the development documents in place of the held-out ones.
    """
    from underpar.build.recipe import load_checked
    from underpar.core.runtime import num_cores
    from underpar.data.sources.corpus import Reading
    from underpar.stages.data import build_data_folder, build_options

    if (bool(val) + (holdout is not None) + bool(val_docs)) > 1:
        raise DataError("--val, --holdout and --val-docs each say what is held out; give one")
    options = build_options(load_checked(recipe, set_ or ()), tokenizer)
    options = replace(
        options,
        holdout=val or (options.holdout if holdout is None else holdout),
        reading=Reading(field, bad_input, split_documents),
        licence=licence,
        workers=workers or num_cores(),
        drop_near=drop_near,
        val_docs=val_docs,
        development=development,
    )
    manifest = build_data_folder(inputs, out, options, open_progress(json), overwrite)
    _show_manifest(out, manifest, json)


@data_app.command("inspect")
def data_inspect(data: DataFolderPath, json: Json = False) -> None:
    """Check a data folder in full and say what it holds.

    \b
    underpar data inspect data

    The SHA-256 names tokenizer and tokens: give it to 'underpar audit --expect-data'.
    """
    from underpar.data.folder import data_sha256, load_data

    folder = load_data(data)
    sha256 = data_sha256(folder)
    _show_manifest(data, folder.manifest | {"data_sha256": sha256}, json)
    if not json:
        OUT.print(f"SHA-256 {sha256}")


@data_app.command("audit")
def data_audit(
    data: DataFolderPath,
    threshold: Annotated[
        float, typer.Option(help="Near duplicate: at least this share of 5-word runs in common.")
    ] = 0.7,
    containment: Annotated[
        float,
        typer.Option(help="List a held-out text if this share of its 13-word runs is in training."),
    ] = 0.05,
    json: Json = False,
) -> None:
    """Find exact and near duplicates across the splits. Exit code 1 if there are any.

    \b
    underpar data audit data
    underpar data audit data --threshold 0.5

    Held-out texts that share long runs of words with training are listed too.
    """
    from underpar.data.duplicates import NearSettings
    from underpar.stages.data import audit_data

    settings = NearSettings(threshold=threshold, threshold_containment=containment)
    result = audit_data(data, settings, open_progress(json))
    show_json(result) if json else _show_duplicates(data, result)
    raise typer.Exit(1 if result["verdict"] == "fail" else 0)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[
        str,
        typer.Argument(
            help="sp1024 sp4096 sp8192 caseops byte260 docs, or a dataset owner/name[@revision]"
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the files.")],
    include: Annotated[
        list[str] | None, typer.Option(help="Only paths that match this glob, may be repeated.")
    ] = None,
    train_files: Annotated[
        int, typer.Option(help="How many training files of a published set.")
    ] = 80,
    token: Annotated[
        str | None,
        typer.Option(help="Access token for gated sets; default: HF_TOKEN, or 'hf auth login'."),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Address of another hub or a mirror; default: HF_ENDPOINT.")
    ] = None,
    json: Json = False,
) -> None:
    """Download a published token set or any Hugging Face dataset; resumes, checks, waits.

    \b
    underpar data fetch sp1024 --out published --train-files 10
    underpar data fetch owner/name --out texts --include "*.parquet"
    HF_TOKEN=... underpar data fetch owner/gated --out texts

    Files that huggingface_hub has in its cache are copied from there, if their checksum is right.
    """
    from underpar.data.sources.fetch import FetchOptions
    from underpar.data.sources.hub import hub_endpoint, hub_token
    from underpar.stages.data import fetch_data

    options = FetchOptions(
        endpoint=endpoint or hub_endpoint(),
        # A token of the environment is not sent to an address of the command line.
        token=token or (None if endpoint else hub_token()),
        include=tuple(include or ()),
        num_train_files=train_files,
    )
    show_summary(json, str(out), asdict(fetch_data(name, out, options, open_progress(json))))


@data_app.command("import")
def data_import(
    source: Annotated[Path, typer.Argument(help="Folder with fineweb_train_*.bin and _val_.")],
    out: Annotated[Path, typer.Option(help="The data folder to write.")],
    tokenizer: Annotated[Path, typer.Option(help="The tokenizer that made the tokens.")],
    transform: Annotated[
        str, typer.Option(help="Text transform that ran before the tokenizer.")
    ] = "identity",
    known: Annotated[
        str | None, typer.Option(help="Published set whose validation totals must match.")
    ] = None,
    licence: Licence = "not stated",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Published token files (header 20240520, with or without sidecar) -> data folder.

    \b
    underpar data import published/datasets/NAME --out data --tokenizer tokenizer.model
    """
    from underpar.data.published.exchange import ImportOptions
    from underpar.stages.data import import_data

    options = ImportOptions(tokenizer, transform, known, licence)
    manifest = import_data(source, out, options, open_progress(json), overwrite)
    _show_manifest(out, manifest, json)


@data_app.command("export")
def data_export(
    data: DataFolderPath,
    out: Annotated[Path, typer.Option(help="Folder for the published layout.")],
    shard_tokens: Annotated[int, typer.Option(help="Tokens per file.")] = 100_000_000,
    json: Json = False,
) -> None:
    """Data folder -> published token files, with a byte sidecar for validation.

    \b
    underpar data export data --out published
    """
    from underpar.data.folder import load_data
    from underpar.data.published.exchange import export_published

    export_published(load_data(data), out, shard_tokens)
    show_json({"out": str(out)}) if json else typer.echo(f"exported to {out}")


@data_app.command("merge")
def data_merge(
    folders: Annotated[
        list[Path], typer.Argument(help="Data folders of one tokenizer and one split rule.")
    ],
    out: Annotated[Path, typer.Option(help="The data folder to write.")],
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Merge data folders that several machines wrote; each is checked in full first.

    \b
    underpar data merge part-1 part-2 part-3 --out data
    """
    from underpar.data.merge import merge_folders

    _show_manifest(out, merge_folders(folders, out, overwrite), json)


def _show_manifest(path: Path, manifest: dict[str, Any], json: bool) -> None:
    if json:
        show_json(manifest)
        return
    from underpar.core.fields import Fields
    from underpar.data.folder import build_again

    fields = Fields(path / "manifest.json", manifest, build_again(path))
    counts = ("documents", "tokens", "bytes")
    rows = [
        (s, *map(m.count, counts), m.number("bytes_per_token"), m.count("changed"))
        for s, m in ((s, fields.table(s)) for s in ("train", "val"))
    ]
    about = fields.table("tokenizer")
    kind = "lossless" if about.values.get("lossless") else "LOSSY, scores are not comparable"
    words = f"{about.count('vocab_size')} pieces, transform {about.text('transform')}"
    title = f"{path}: {words}, {kind}"
    columns = ("split", "documents#", "tokens#", "bytes#", "bytes/token#", "changed documents#")
    # Read in full before anything is printed: an error stands alone.
    notes = list(_notes(fields))
    show_table(title, columns, rows)
    for note in notes:
        OUT.print(one_line(note), markup=False, soft_wrap=True)


def _notes(fields: Fields) -> Iterator[str]:
    """What a manifest says beyond its counts, a line each."""
    if "end_fraction" in fields.table("split").values:
        share = fields.table("split").finite("end_fraction")
        size = fields.table("reading").count("split_documents")
        yield (
            f"too few documents to hold some out: of each, the last {share:.0%} is held out, in "
            f"pieces of up to {size:,} characters"
        )
    if "dropped" in fields.values:
        dropped = fields.table("dropped")
        training, held_out = (
            count_text(len(dropped.texts(split)), f"{kind} text")
            for split, kind in (("train", "training"), ("val", "held-out"))
        )
        yield (
            f"left out as copies: {training} and {held_out} ({dropped.finite('similarity'):.0%} "
            "alike, or in pieces), and held-out texts that repeat exactly"
        )
    if "skipped" in fields.values:
        skipped = fields.table("skipped")
        kinds = ", ".join(f"{n:,.0f} {kind}" for kind, n in skipped.numbers("kinds").items())
        first = ", ".join(skipped.texts("first")[:3])
        yield f"{count_text(skipped.count('files'), 'file')} skipped ({kinds}), such as {first}"
    if "tally" in fields.values:
        tally = fields.table("tally")
        names = ("repaired", "replaced_characters", "left_out_empty")
        repaired, characters, left_out = map(tally.count, names)
        if repaired or left_out:
            yield (
                f"{count_text(repaired, 'document')} repaired "
                f"({count_text(characters, 'character')}), "
                f"{count_text(left_out, 'empty document')} left out"
            )


def _show_duplicates(path: Path, result: dict[str, Any]) -> None:
    rows = [
        (kind, row.get("similarity", row.get("share", 1.0)), _name(row, "train"), _name(row, "val"))
        for kind in ("exact", "near", "overlap")
        for row in result[kind]["worst"]
    ]
    columns = ("kind", "shared#", "training document", "held-out document")
    show_table(f"{path}: {result['summary']}", columns, rows)


def _name(row: dict[str, Any], side: str) -> str:
    return f"{row[side]['index']}: {row[side]['text'][:40]!r}"
