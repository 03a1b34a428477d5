"""Exchange with published token files: out and in again unchanged, and every wrong set refused."""

import json
import re
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from small_data import (
    contents,
    decoded,
    prose,
    published_model,
    read_published,
    write_file,
    write_jsonl,
    write_published,
)
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import hash_file, load_data
from underpar.data.published import exchange
from underpar.data.published.exchange import (
    BY_NAME,
    ImportOptions,
    export_published,
    import_published,
)
from underpar.data.published.files import split_files
from underpar.data.shards import CHANGED
from underpar.data.sources.corpus import document_hash
from underpar.data.tokens.byte260 import CONTENT, ByteTokenizer
from underpar.data.tokens.train_bpe import train_tokenizer
from underpar.errors import DataError

KINDS = {
    "bpe": BuildOptions(400, 0.3),
    "caseops_before": BuildOptions(400, 0.3, transform="caseops_before"),
    "bytes": BuildOptions(None, 0.3, kind="bytes"),
}
SHARD_TOKENS = 997
# Long enough to straddle files, and some too short to fill one.
TEXTS = [*prose(20, 800), *(f"Short One {i}" for i in range(20)), "\x00 \u2581 \U0001f600"]
OPERATORS = [f"An Operator \ue001 In {i} \ue004Texts" for i in range(12)]
BYTES = ByteTokenizer()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a kind to a root with its data folder "data" and export "export"."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            root = made[kind] = tmp_path_factory.mktemp(kind)
            docs = write_jsonl(root / "docs.jsonl", TEXTS + (OPERATORS if kind != "bpe" else []))
            build_data([docs], root / "data", KINDS[kind])
            export_published(load_data(root / "data"), root / "export", SHARD_TOKENS)
        return made[kind]

    return make


def token_files(export: Path) -> Path:
    return next((export / "datasets").iterdir())


def options_for(kind: str, export: Path) -> ImportOptions:
    transform = "caseops_before" if kind == "caseops_before" else "identity"
    return ImportOptions(next((export / "tokenizers").iterdir()), transform, licence="ODC-By 1.0")


def without_manifest(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name != "manifest.json"}


def refusal(source: Path, out: Path, options: ImportOptions) -> str:
    with pytest.raises(DataError) as caught:
        import_published(source, out, options)
    assert "\n" not in str(caught.value)
    # At most the tokenizer was put there: no shard, no part of one, no manifest.
    assert not out.exists() or set(contents(out)) <= {"tokenizer.model"}
    return str(caught.value)


def test_out_and_in_again_gives_the_same_bytes(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    root = folders(kind)
    import_published(token_files(root / "export"), tmp_path, options_for(kind, root / "export"))
    original = without_manifest(root / "data")
    assert without_manifest(tmp_path) == original
    assert ("val_bytes.bin" in original) == (kind == "caseops_before")
    load_data(tmp_path)


def test_the_export_is_the_streams_cut_into_files(
    kind: str, folders: Callable[[str], Path]
) -> None:
    root = folders(kind)
    data, files = load_data(root / "data"), token_files(root / "export")
    for split, shard in (("train", data.train), ("val", data.val)):
        pieces = [read_published(path) for path in split_files(files, split)]
        assert list(chain.from_iterable(pieces)) == shard.tokens.tolist()
        assert all(len(piece) == SHARD_TOKENS for piece in pieces[:-1])
        # A document goes on in the next file.
        assert any(piece[0] != 1 for piece in pieces[1:])
        assert (len(list(files.glob(f"fineweb_{split}_bytes_*.bin"))) > 0) == (split == "val")
    sidecar = list(
        chain.from_iterable(map(read_published, sorted(files.glob("fineweb_val_bytes_*.bin"))))
    )
    sums = np.add.reduceat(np.array(sidecar), data.val.starts)
    assert sums.tolist() == data.val.doc_bytes.tolist()


def test_the_exports_manifest_describes_it(kind: str, folders: Callable[[str], Path]) -> None:
    root = folders(kind)
    data, export = load_data(root / "data"), root / "export"
    manifest = json.loads((export / "manifest.json").read_text())
    assert manifest["num_docs"] == data.train.num_documents + data.val.num_documents
    assert manifest["num_val_docs"] == data.val.num_documents
    assert manifest["shard_size"] == SHARD_TOKENS
    [tokenizer], [dataset] = manifest["tokenizers"], manifest["datasets"]
    assert (export / tokenizer["model_path"]).read_bytes() == data.tokenizer.content
    assert tokenizer["vocab_size"] == data.tokenizer.vocab_size
    assert tokenizer.get("text_transform", "identity") == data.tokenizer.transform_name
    for shard, split in ((data.train, "train"), (data.val, "val")):
        stats = [dataset["stats"][f"{unit}_{split}"] for unit in ("docs", "tokens", "files")]
        num_files = len(split_files(token_files(export), split))
        assert stats == [shard.num_documents, shard.num_tokens, num_files]


@pytest.mark.parametrize("shard_tokens", [1, 2, 5, 1000])
def test_files_of_any_size(tmp_path: Path, shard_tokens: int) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", ["some training text", "more", "x"])
    val = write_jsonl(tmp_path / "val.jsonl", ["held out", "yz"])
    build_data([train], tmp_path / "data", BuildOptions(None, [val], kind="bytes"))
    export_published(load_data(tmp_path / "data"), tmp_path / "e", shard_tokens)
    files = token_files(tmp_path / "e")
    num_val_tokens = len("held out") + len("yz") + 2
    assert len(split_files(files, "val")) == -(-num_val_tokens // shard_tokens)
    import_published(files, tmp_path / "back", options_for("bytes", tmp_path / "e"))
    assert without_manifest(tmp_path / "back") == without_manifest(tmp_path / "data")


@pytest.mark.parametrize("batch_tokens", [1, 50, 1000])
def test_batches_change_nothing(
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_tokens: int,
) -> None:
    root = folders("bpe")
    monkeypatch.setattr(exchange, "BATCH_TOKENS", batch_tokens)
    options = options_for("bpe", root / "export")
    import_published(token_files(root / "export"), tmp_path, options)
    assert without_manifest(tmp_path) == without_manifest(root / "data")


def test_the_imported_manifest_says_where_all_came_from(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    root = folders("bpe")
    files, calls = token_files(root / "export"), []
    manifest = import_published(
        files, tmp_path, options_for("bpe", root / "export"), lambda *call: calls.append(call)
    )
    assert manifest["split"] == {"rule": BY_NAME, "fraction": None}
    assert manifest["shared_documents"] == 0
    # There is no text to read again, so the audit cannot count in it.
    assert "reading" not in manifest
    paths = [*split_files(files, "val"), *split_files(files, "train")]
    assert [row["path"] for row in manifest["inputs"]] == [str(path) for path in paths]
    for row, path in zip(manifest["inputs"], paths, strict=True):
        assert (row["sha256"], row["bytes"]) == (hash_file(path), path.stat().st_size)
        assert row["licence"] == "ODC-By 1.0"
    for split in ("train", "val"):
        spans = [row["documents"].get(split) for row in manifest["inputs"]]
        covered = list(chain.from_iterable(range(*span) for span in spans if span))
        assert covered == list(range(manifest[split]["documents"]))
    assert calls[-1] == ("train", len(TEXTS))
    original = load_data(root / "data").manifest
    for split in ("train", "val"):
        assert manifest[split]["documents_sha256"] == original[split]["documents_sha256"]


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lossy data folder and its export, validation with sidecar."""
    root = tmp_path_factory.mktemp("lossy")
    val = write_jsonl(root / "val.jsonl", ["half \u00bd  cup", "plain text", " edges "])
    train = write_jsonl(root / "train.jsonl", list(prose(3, 300)))
    model = write_file(root / "m.model", published_model())
    build_data([train], root / "data", BuildOptions(None, [val], tokenizer=model))
    export_published(load_data(root / "data"), root / "export", 7)
    return root


def test_the_sidecar_is_believed_where_tokens_do_not_hold_the_text(
    lossy: Path, tmp_path: Path
) -> None:
    files, options = token_files(lossy / "export"), ImportOptions(lossy / "m.model")
    manifest = import_published(files, tmp_path, options)
    data, original = load_data(tmp_path), load_data(lossy / "data")
    assert manifest["val"]["ledger"] == "sidecar"
    assert (tmp_path / "val_bytes.bin").read_bytes() == (
        lossy / "data" / "val_bytes.bin"
    ).read_bytes()
    # The spaces at the edges of the last text belong to no token, so an importer cannot know them.
    assert data.val.doc_bytes.tolist() == [12, 10, 5]
    assert original.val.doc_bytes.tolist() == [12, 10, 7]
    assert (data.val.flags & CHANGED).tolist() == [1, 0, 0]
    texts = decoded(data, data.val)
    assert texts == ["half 1\u20442 cup".encode(), b"plain text", b"edges"]
    assert [row.tobytes() for row in data.val.doc_hashes] == [
        document_hash(text.decode()) for text in texts
    ]


def test_without_a_sidecar_the_bytes_are_those_of_the_tokens(lossy: Path, tmp_path: Path) -> None:
    files = Path(shutil.copytree(token_files(lossy / "export"), tmp_path / "files"))
    for path in files.glob("*_bytes_*"):
        path.unlink()
    manifest = import_published(files, tmp_path / "out", ImportOptions(lossy / "m.model"))
    data = load_data(tmp_path / "out")
    assert manifest["val"]["ledger"] == "sidecar"
    assert data.val.doc_bytes.tolist() == [len(text) for text in decoded(data, data.val)]


def test_files_without_their_sidecars_go_by_the_table(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    root = folders(kind)
    files = Path(shutil.copytree(token_files(root / "export"), tmp_path / "files"))
    sidecars = sorted(files.glob("fineweb_val_bytes_*.bin"))
    sidecars[0].unlink()
    for path in sidecars[1:] if kind == "caseops_before" else []:
        path.unlink()
    options = options_for(kind, root / "export")
    if kind == "caseops_before":
        # Escaped operators have bytes that no table knows.
        message = refusal(files, tmp_path / "out", options)
        assert "its tokens are counted as" in message
        assert message.endswith("its sidecar is wrong or missing")
    else:
        import_published(files, tmp_path / "out", options)
        assert without_manifest(tmp_path / "out") == without_manifest(root / "data")


def test_a_sidecar_that_disagrees_with_the_text_is_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    root = folders("bpe")
    files = Path(shutil.copytree(token_files(root / "export"), tmp_path / "files"))
    path = files / "fineweb_val_bytes_000000.bin"
    source_bytes = read_published(path)
    size = int(load_data(root / "data").val.doc_bytes[0])
    for change in (1, -1):
        write_published(path, [0, source_bytes[1] + change, *source_bytes[2:]])
        assert refusal(files, tmp_path / "out", options_for("bpe", root / "export")) == (
            f"{files}/fineweb_val_000000.bin: document 0 decodes to {size} bytes, its tokens are "
            f"counted as {size + change}; its sidecar is wrong or missing"
        )


def test_export_does_not_join_another_export(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    root = folders("bytes")
    data = load_data(root / "data")
    export = Path(shutil.copytree(root / "export", tmp_path / "export"))
    before = contents(token_files(export))
    with pytest.raises(DataError, match="holds an export already"):
        export_published(data, export)
    # Without its manifest, the token files themselves are in the way.
    (export / "manifest.json").unlink()
    for path in token_files(export).glob("fineweb_train_*.bin"):
        path.unlink()
        before.pop(path.name)
    with pytest.raises(DataError, match="is not empty; choose a new folder"):
        export_published(data, export)
    assert contents(token_files(export)) == before


def test_totals_of_a_known_set_must_match(folders: Callable[[str], Path], tmp_path: Path) -> None:
    root = folders("bpe")
    files, options = token_files(root / "export"), options_for("bpe", root / "export")
    known = ImportOptions(options.tokenizer, known="sp1024")
    num_tokens = load_data(root / "data").val.num_tokens
    assert refusal(files, tmp_path / "out", known).startswith(
        f"sp1024 validation has {num_tokens:,} tokens, the published set 62,021,846: it looks like"
    )
    unknown = ImportOptions(options.tokenizer, known="sp1023")
    assert "no published validation set 'sp1023'" in refusal(files, tmp_path / "out", unknown)


def test_matching_totals_are_accepted(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folders("bpe")
    val = load_data(root / "data").val
    totals = {"ours": (val.num_tokens - 1, val.num_bytes)}
    monkeypatch.setattr("underpar.data.published.files.KNOWN_VAL", totals)
    options = ImportOptions(options_for("bpe", root / "export").tokenizer, known="ours")
    import_published(token_files(root / "export"), tmp_path / "out", options)
    assert load_data(tmp_path / "out").val.num_tokens == val.num_tokens


def published_bytes(folder: Path, val: list[str], train: list[str]) -> ImportOptions:
    """Token files of these texts, made by hand."""
    for split, texts in (("val", val), ("train", train)):
        stream = BYTES.encode_texts(texts).tokens.tolist()
        write_published(folder / f"fineweb_{split}_000000.bin", stream)
    return ImportOptions(write_file(folder / "byte260.json", CONTENT))


def test_natural_copies_are_counted_and_more_are_refused(tmp_path: Path) -> None:
    val = [f"validation document {i}" for i in range(2000)]
    for num_copies in (0, 1, 2):
        folder = tmp_path / str(num_copies)
        options = published_bytes(folder, val, ["training", *val[5 : 5 + num_copies]])
        manifest = import_published(folder, folder / "out", options)
        assert manifest["shared_documents"] == num_copies
        assert load_data(folder / "out").train.num_documents == 1 + num_copies
    folder = tmp_path / "3"
    options = published_bytes(folder, val, ["training", *val[5:8]])
    digest = document_hash(val[7]).hex()[:16]
    assert refusal(folder, folder / "out", options) == (
        f"{folder}/fineweb_train_000000.bin: 3 training documents are also held out (the last one "
        f"SHA-256 {digest}...), at most 2 may be; remove them from one split"
    )


def test_a_small_set_has_no_natural_copies(tmp_path: Path) -> None:
    options = published_bytes(tmp_path, [f"document {i}" for i in range(999)], ["document 8"])
    assert "at most 0 may be" in refusal(tmp_path, tmp_path / "out", options)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("fineweb_val_000000.bin", [70, 1, 71], r"does not begin with BOS \(1\)"),
        ("fineweb_val_000000.bin", [], r"does not begin with BOS \(1\)"),
        ("fineweb_train_000000.bin", [70, 71], r"does not begin with BOS \(1\)"),
        ("fineweb_val_000000.bin", [1, 70, 3, 71], "token 2 is UNK"),
        ("fineweb_train_000000.bin", [1, 70, 2], "token 2 is EOS"),
        ("fineweb_train_000000.bin", [1, 0, 70], "token 1 is PAD"),
        ("fineweb_val_000000.bin", [1, 70, 260], "token 2 is id 260, the tokenizer has 260 ids"),
        ("fineweb_val_bytes_000000.bin", [0, 1], "2 entries for 9 tokens"),
        ("fineweb_val_bytes_000000.bin", [1] * 9, "BOS at token 0 has 1 bytes, expected 0"),
        ("fineweb_val_bytes_000000.bin", [0, *[2] * 8], "decodes to 8 bytes, .* counted as 16"),
        ("fineweb_val_000002.bin", [1, 70], r"fineweb_val_000001\.bin is missing"),
        ("fineweb_train_old.bin", [1, 70], "name is not fineweb_train_ and six digits"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, name: str, values: list[int], message: str
) -> None:
    options = published_bytes(tmp_path, ["held out"], ["training"])
    write_published(tmp_path / name, values)
    refused = refusal(tmp_path, tmp_path / "out", options)
    assert re.search(message, refused)
    assert refused.startswith(f"{tmp_path}/fineweb_")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_set_without_a_split_is_refused(tmp_path: Path, split: str) -> None:
    options = published_bytes(tmp_path, ["held out"], ["training"])
    (tmp_path / f"fineweb_{split}_000000.bin").unlink()
    assert f"fineweb_{split}_000000.bin is missing" in refusal(tmp_path, tmp_path / "o", options)


def test_a_document_of_bos_alone_has_no_bytes(tmp_path: Path) -> None:
    options = published_bytes(tmp_path, ["held out"], ["training"])
    write_published(tmp_path / "fineweb_val_000000.bin", [1, 1, 70, 1])
    import_published(tmp_path, tmp_path / "out", options)
    assert load_data(tmp_path / "out").val.doc_bytes.tolist() == [0, 1, 0]


def test_another_tokenizers_ids_are_refused(tmp_path: Path) -> None:
    large = write_file(tmp_path / "large.model", train_tokenizer(prose(40), 420))
    small = write_file(tmp_path / "small.model", train_tokenizer(prose(40), 400))
    docs = write_jsonl(tmp_path / "docs.jsonl", TEXTS)
    build_data([docs], tmp_path / "data", BuildOptions(None, 0.3, tokenizer=large))
    export_published(load_data(tmp_path / "data"), tmp_path / "export")
    message = refusal(token_files(tmp_path / "export"), tmp_path / "out", ImportOptions(small))
    assert "the tokenizer has 400 ids" in message


def test_a_normalized_caseops_stream_can_be_imported(tmp_path: Path) -> None:
    # The trade mark sign becomes the letters TM, and the operator of "Bar" then stands in a word.
    val = write_jsonl(tmp_path / "val.jsonl", ["Plain", "Foo\u2122Bar is sold here"])
    train = write_jsonl(tmp_path / "train.jsonl", ["Training text"])
    model = write_file(tmp_path / "m.model", published_model("caseops"))
    options = BuildOptions(None, [val], tokenizer=model, transform="caseops")
    build_data([train], tmp_path / "data", options)
    export_published(load_data(tmp_path / "data"), tmp_path / "export")
    manifest = import_published(
        token_files(tmp_path / "export"), tmp_path / "back", ImportOptions(model, "caseops")
    )
    assert manifest["val"]["bytes"] == len("Plain") + len("Foo\u2122Bar is sold here".encode())


def test_tokens_of_another_tokenizer_are_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    files = token_files(folders("caseops_before") / "export")
    model = folders("caseops_before") / "data" / "tokenizer.model"
    message = refusal(files, tmp_path / "out", ImportOptions(model, "caseops"))
    assert message.endswith("give the tokenizer and transform that made them")
