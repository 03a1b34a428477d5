"""The byte and data bugs found in the wild, one test each: the wrong number, and what catches it.

Numbers are those of the list of public bugs (9.1 to 9.16); totals in the comments are what the
bug did to published scores.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import sentencepiece
import torch

from small_data import (
    decoded,
    edit_manifest,
    held_out,
    prose,
    published_model,
    read_published,
    rewrite_sidecar,
    rewrite_split,
    train_sentencepiece,
    write_file,
    write_jsonl,
    write_published,
)
from thread_ranks import Ranks, Unheard
from underpar.audit import scores as rules
from underpar.audit.case import Limits
from underpar.audit.data import byte_count
from underpar.audit.finding import FAIL, PASS, Finding
from underpar.core.runtime import Clock, Runtime
from underpar.data.batch import Batch
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import DataFolder, load_data
from underpar.data.published.exchange import ImportOptions, export_published, import_published
from underpar.data.published.export import PublishedWriter
from underpar.data.published.files import check_known_val, split_files
from underpar.data.shards import CHANGED, Columns, Shard
from underpar.data.tokens.byte260 import CONTENT, ByteTokenizer
from underpar.data.tokens.tokenizer import open_tokenizer
from underpar.errors import DataError, RuleError
from underpar.recipe import ScorePart
from underpar.score.ledger import Entry, Score
from underpar.score.scorer import Scorer

VAL_TEXTS = [
    *prose(44)[40:],
    "Caf\u00e9 \u2603 \U0001f600 in The NASA Building, 20 words or so.",
    "iPhone and McDonald's \u4e2d\u6587.",
]
NUM_BYTES = sum(len(text.encode()) for text in VAL_TEXTS)
OPERATORS = range(4, 8)
BYTES = ByteTokenizer()
CONTEXT = 16

Weights = npt.NDArray[np.int64]


def build_folder(root: Path, val: Sequence[str] = VAL_TEXTS, transform: str = "identity") -> Path:
    inputs = [write_jsonl(root / "train.jsonl", prose(40))]
    options = BuildOptions(400, [write_jsonl(root / "val.jsonl", list(val))], transform=transform)
    build_data(inputs, root / "data", options)
    return root / "data"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "data"))


@pytest.fixture(scope="module")
def built_caseops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CaseOps as published; the operator in the last text makes the ledger a sidecar."""
    texts = [*VAL_TEXTS, "An \ue001 operator"]
    return build_folder(tmp_path_factory.mktemp("caseops"), texts, "caseops")


@pytest.fixture
def caseops(built_caseops: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built_caseops, tmp_path / "caseops"))


def processor(folder: Path) -> sentencepiece.SentencePieceProcessor:
    content = (folder / "tokenizer.model").read_bytes()
    return sentencepiece.SentencePieceProcessor(model_proto=content)


def published_table(folder: Path) -> tuple[Weights, npt.NDArray[np.bool_]]:
    """Bytes of each piece without its leading space, and whether it has one (the public table)."""
    model = processor(folder)
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    base = [
        0
        if model.is_control(i) or model.is_unknown(i)
        else 1
        if model.is_byte(i)
        else len(piece.removeprefix("\u2581").encode())
        for i, piece in enumerate(pieces)
    ]
    lead = [piece.startswith("\u2581") for piece in pieces]
    return np.array(base, dtype=np.int64), np.array(lead)


def after_text(tokens: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether the token before each one is no boundary, so that a leading space is a real one."""
    return np.append(False, tokens[:-1] > 3)


def byte_finding(path: Path, num_bytes: Sequence[int]) -> Finding:
    """The audit's rule about bytes, for a score that claims these."""
    entries = [Entry(i, 8.0, n, 1) for i, n in enumerate(num_bytes)]
    data, scores = load_data(path), {"plain": Score("plain", entries)}
    case: Any = SimpleNamespace(data=data, data_path=path, scores=scores, limits=Limits())
    return byte_count(case)


def assert_refused(folder: Path, source_bytes: Weights) -> None:
    """A validation shard with these bytes is refused by the folder, or at last by the audit."""
    val = load_data(folder).val
    wrong = np.add.reduceat(source_bytes, val.starts)
    assert wrong.sum() != NUM_BYTES == val.num_bytes
    assert byte_finding(folder, val.doc_bytes.tolist()).verdict == PASS
    assert byte_finding(folder, wrong.tolist()).verdict == FAIL
    rewrite_split(folder, "val", lambda columns: dataclasses.replace(columns, doc_bytes=wrong))
    with pytest.raises(
        DataError, match=r"val\.shard: \d+ documents have another length than their tokens"
    ):
        load_data(folder)
    # A manifest and a sidecar that go along with it do not get past the text itself.
    off_table = int(np.count_nonzero(wrong != val.doc_bytes))
    edit_manifest(folder, lambda m: m["val"].update(off_table=off_table, ledger="sidecar"))
    rewrite_sidecar(folder, source_bytes.tolist())
    finding = byte_finding(folder, wrong.tolist())
    assert finding.verdict == FAIL
    assert f"{off_table} held-out documents do not decode" in finding.summary


def test_bug_01_space_counted_twice(folder: Path) -> None:
    # 176,332,748 bytes instead of 151,080,891: bits per byte times 0.857.
    data = load_data(folder)
    base, lead = published_table(folder)
    tokens = data.val.tokens
    right = base[tokens] + (lead[tokens] & after_text(tokens))
    assert right.sum() == NUM_BYTES
    assert np.array_equal(data.tokenizer.token_bytes[tokens], right)
    wrong = (base + lead)[tokens] + (lead[tokens] & after_text(tokens))
    assert wrong.sum() > 1.1 * NUM_BYTES
    assert_refused(folder, wrong)


def test_bug_02_byte_pieces_by_their_spelling(folder: Path) -> None:
    # The piece of byte 0xE2 is spelled <0xE2>, six characters.
    data, model = load_data(folder), processor(folder)
    is_byte = np.array([model.is_byte(i) for i in range(model.vocab_size())])
    num_byte_tokens = int(is_byte[data.val.tokens].sum())
    assert num_byte_tokens > 10
    wrong = np.where(is_byte, 6, data.tokenizer.token_bytes)[data.val.tokens].astype(np.int64)
    assert wrong.sum() == NUM_BYTES + 5 * num_byte_tokens
    assert_refused(folder, wrong)


def test_bug_03_byte_tokens_as_replacement_characters(folder: Path) -> None:
    # 157,319,833 bytes instead of 151,073,604: each byte decodes alone to U+FFFD.
    data, model = load_data(folder), processor(folder)
    tokens = data.val.tokens.tolist()
    decoded_alone = [len(model.decode([token]).encode()) for token in tokens]
    is_byte = [model.is_byte(token) for token in tokens]
    assert {n for n, byte in zip(decoded_alone, is_byte, strict=True) if byte} >= {3}
    pairs = zip(tokens, decoded_alone, is_byte, strict=True)
    wrong = [n if byte else data.tokenizer.token_bytes[token] for token, n, byte in pairs]
    assert sum(wrong) > NUM_BYTES
    assert_refused(folder, np.array(wrong, dtype=np.int64))


def test_bug_04_no_piece_for_a_space() -> None:
    # Parameter Golf issue 897: about 20 % more bytes.
    content = train_sentencepiece(["abcdefgh" * 20, "hgfedcba" * 20] * 5, 300)
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    ids = model.encode("abc abc")
    wrong = sum(1 if model.is_byte(i) else len(model.id_to_piece(i).encode()) for i in ids)
    assert wrong == len("abc abc") + 2
    with pytest.raises(DataError, match=r"tokenizer has no piece for a space alone \(U\+2581\)"):
        open_tokenizer(content)


def test_bug_05_fixed_bytes_per_token(folder: Path) -> None:
    val = load_data(folder).val
    wrong = np.where(np.isin(np.arange(val.num_tokens), val.starts), 0, 3.5)
    # Whole bytes a document, as a ledger stores them.
    for a, b in pairwise([*val.starts.tolist(), val.num_tokens]):
        wrong[a:b] = np.diff(np.floor(np.append(0, np.cumsum(wrong[a:b]))))
    assert abs(wrong.sum() / (val.num_tokens - val.num_documents) - 3.5) < 0.1
    assert_refused(folder, wrong.astype(np.int64))


def reference_sidecar(folder: Path, texts: Sequence[str]) -> list[int]:
    """Bytes a token by a walk over the characters of its piece, written from the public law."""
    data = load_data(folder)
    source_bytes = []
    for index, text in enumerate(texts):
        written = data.tokenizer.transform.forward(text)
        # What each byte of the written text pays: a character pays where it ends.
        pays, is_literal = [], False
        for char in written:
            is_operator = "\ue001" <= char <= "\ue004" and not is_literal
            is_literal = char == "\ue004" and not is_literal
            size = len(char.encode())
            pays += [0] * (size - 1) + [0 if is_operator else size]
        at = 0
        for token in data.val.doc(index).tolist():
            size = len(data.tokenizer.written([token]))
            source_bytes.append(sum(pays[at : at + size]))
            at += size
        assert at == len(pays)
    return source_bytes


def test_bug_06_operators_credited_three_bytes(caseops: Path, tmp_path: Path) -> None:
    texts = [*VAL_TEXTS, "An \ue001 operator"]
    right = read_published(caseops / "val_bytes.bin")
    # Rebuilt from the text: no mismatch.
    assert right == reference_sidecar(caseops, texts)
    assert sum(right) == sum(len(text.encode()) for text in texts)
    tokens = load_data(caseops).val.tokens
    is_credited = np.isin(tokens, OPERATORS) & (np.array(right) == 0)
    wrong = np.where(is_credited, 3, right)
    assert wrong.sum() > 1.02 * sum(right)
    export_published(load_data(caseops), tmp_path / "export")
    files = tmp_path / "export" / "datasets" / "underpar_400"
    options = ImportOptions(caseops / "tokenizer.model", "caseops")
    import_published(files, tmp_path / "right", options)
    write_published(files / "fineweb_val_bytes_000000.bin", wrong.tolist())
    with pytest.raises(DataError, match=r"document 0 decodes to .* its sidecar is wrong or"):
        import_published(files, tmp_path / "wrong", options)
    assert not (tmp_path / "wrong" / "manifest.json").exists()
    rewrite_sidecar(caseops, wrong.tolist())
    with pytest.raises(DataError, match=r"val_bytes\.bin: the entries of document 0 do not add up"):
        load_data(caseops)


def test_bug_07_table_on_a_caseops_stream(caseops: Path) -> None:
    data = load_data(caseops)
    base, lead = published_table(caseops)
    tokens = data.val.tokens
    wrong = base[tokens] + (lead[tokens] & after_text(tokens))
    num_operators = int(np.isin(tokens, OPERATORS).sum())
    # One operator stands for itself, behind an escape.
    assert wrong.sum() == data.val.num_bytes + 3 * (num_operators - 1)
    assert data.tokenizer.token_bytes[list(OPERATORS)].tolist() == [0, 0, 0, 0]
    with pytest.raises(DataError, match=r"pieces for case operators \(U\+E001\) but no transform"):
        open_tokenizer((caseops / "tokenizer.model").read_bytes(), "identity")
    edit_manifest(caseops, lambda manifest: manifest["tokenizer"].update(transform="identity"))
    with pytest.raises(DataError, match=r"tokenizer\.model: tokenizer has pieces for case"):
        load_data(caseops)


def write_set(folder: Path, val: Sequence[str], train: Sequence[str]) -> ImportOptions:
    """Published files of byte tokens, with a sidecar for validation."""
    for split, texts in (("val", val), ("train", train)):
        pieces = BYTES.encode_texts(texts)
        write_published(folder / f"fineweb_{split}_000000.bin", pieces.tokens.tolist())
        if split == "val":
            source_bytes = pieces.source_bytes.tolist()
            write_published(folder / "fineweb_val_bytes_000000.bin", source_bytes)
    return ImportOptions(write_file(folder / "byte260.json", CONTENT))


def test_bug_08_sidecar_read_as_tokens(tmp_path: Path) -> None:
    options = write_set(tmp_path, ["held out", "also"], ["training"])
    # What the public glob loads: twice as many "tokens", half of them byte counts.
    globbed = sorted(tmp_path.glob("fineweb_val_*.bin"))
    assert sum(len(read_published(path)) for path in globbed) == 2 * 14
    assert [path.name for path in split_files(tmp_path, "val")] == ["fineweb_val_000000.bin"]
    manifest = import_published(tmp_path, tmp_path / "out", options)
    assert manifest["val"]["tokens"] == 14
    # Under the name of a token file it is refused for what it holds.
    shutil.copy(globbed[1], tmp_path / "fineweb_val_000001.bin")
    with pytest.raises(DataError, match=r"fineweb_val_000001\.bin: token 0 is PAD"):
        import_published(tmp_path, tmp_path / "again", options)


def test_bug_09_first_ten_thousand_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="partial validation set, take all 50,000 documents"):
        check_known_val("caseops", 9_662_502, 32_756_252)
    # The same by an import, with a set of 50 documents in place of the 50,000.
    texts = [f"validation document {i}" for i in range(50)]
    whole = BYTES.encode_texts(texts)
    totals = {"set": (len(whole.tokens) - 1, int(whole.source_bytes.sum()))}
    monkeypatch.setattr("underpar.data.published.files.KNOWN_VAL", totals)
    for num_documents in (50, 10):
        folder = tmp_path / str(num_documents)
        options = write_set(folder, texts[:num_documents], ["training"])
        known = dataclasses.replace(options, known="set")
        if num_documents == 50:
            assert import_published(folder, folder / "out", known)["val"]["documents"] == 50
            continue
        with pytest.raises(DataError, match="looks like a partial validation set"):
            import_published(folder, folder / "out", known)
        assert not (folder / "out" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["fineweb_val_000000.bin", "fineweb_val_bytes_000000.bin"])
def test_bug_10_truncated_shard(folder: Path, tmp_path: Path, name: str) -> None:
    options = write_set(tmp_path / "set", ["held out"] * 20, ["training"])
    path = tmp_path / "set" / name
    data = path.read_bytes()
    # A reader that goes by the size of the file takes what is there for all there is.
    path.write_bytes(data[:-100])
    assert 0 < len(read_published(path)) < 20 * 9
    with pytest.raises(DataError, match=rf"{name}: file has \d+ bytes, its header promises \d+"):
        import_published(tmp_path / "set", tmp_path / "out", options)
    shard = folder / "val.shard"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"val\.shard: file has \d+ bytes, its header promises"):
        load_data(folder, verify=False)


def test_bug_11_validation_of_every_slice(tmp_path: Path) -> None:
    texts = [f"document number {i}" for i in range(80)]
    slices = [texts[i : i + 20] for i in range(0, 80, 20)]
    right_val, right_train = texts[:5], texts[5:]
    wrong_val = [text for part in slices for text in part[:5]]
    assert len(wrong_val) == 4 * len(right_val)
    # Beside the training files of a right export, 15 of them are documents it was trained on.
    options = write_set(tmp_path / "wrong", wrong_val, right_train)
    with pytest.raises(DataError, match="15 training documents are also held out"):
        import_published(tmp_path / "wrong", tmp_path / "out", options)
    # Beside its own, the name of the split's text gives it away.
    own_train = [text for part in slices for text in part[5:]]
    names = []
    for name, val, train in (("a", right_val, right_train), ("b", wrong_val, own_train)):
        options = write_set(tmp_path / name, val, train)
        manifest = import_published(tmp_path / name, tmp_path / f"{name}-out", options)
        names.append(manifest["val"]["documents_sha256"])
    assert names[0] != names[1]
    # Our own split asks the document alone, so slices hold out what the whole does.
    decoded_texts = []
    for number, part in enumerate(slices):
        path = write_jsonl(tmp_path / f"{number}.jsonl", part)
        build_data([path], tmp_path / f"slice{number}", BuildOptions(None, 0.3, kind="bytes"))
        data = load_data(tmp_path / f"slice{number}")
        decoded_texts += [text.decode() for text in decoded(data, data.val)]
    assert decoded_texts == held_out(texts, 0.3)


def encoded_as(data: DataFolder, change: Callable[[str], str]) -> Callable[[Columns], Columns]:
    """Tokens of changed texts under the bytes and hashes of the real ones."""

    def forge(columns: Columns) -> Columns:
        pieces = data.tokenizer.encode_texts([change(text) for text in VAL_TEXTS])
        return dataclasses.replace(columns, tokens=pieces.tokens, counts=pieces.counts)

    return forge


def test_bug_12_text_changed_before_counting(folder: Path, tmp_path: Path) -> None:
    data = load_data(folder)
    # Case folding keeps the bytes of ASCII text: only the text itself tells.
    rewrite_split(folder, "val", encoded_as(data, str.lower))
    folded = load_data(folder)
    assert folded.val.num_bytes == data.val.num_bytes
    assert folded.val.num_tokens < data.val.num_tokens
    finding = byte_finding(folder, folded.val.doc_bytes.tolist())
    assert finding.verdict == FAIL
    assert "6 held-out documents do not decode to their text" in finding.summary
    # A map that shortens text does not even have the bytes.
    rewrite_split(folder, "val", encoded_as(data, lambda text: text.replace("\u00e9", "e")))
    with pytest.raises(
        DataError, match=r"val\.shard: 1 documents have another length than their tokens"
    ):
        load_data(folder)
    # A tokenizer that folds by itself is lossy: every changed text is stamped, no score passes.
    content = train_sentencepiece(prose(40), 400, normalization_rule_name="nmt_nfkc_cf")
    model = write_file(tmp_path / "fold.model", content)
    val = [write_jsonl(tmp_path / "val.jsonl", VAL_TEXTS)]
    train = write_jsonl(tmp_path / "train.jsonl", prose(40))
    manifest = build_data([train], tmp_path / "fold", BuildOptions(None, val, tokenizer=model))
    assert manifest["tokenizer"]["lossless"] is False
    data = load_data(tmp_path / "fold")
    assert (data.val.flags == CHANGED).all()
    finding = byte_finding(tmp_path / "fold", data.val.doc_bytes.tolist())
    assert finding.verdict == FAIL
    assert "changes 6 held-out documents beyond NFKC and spaces" in finding.summary


def test_bug_13_byte_fallback_off(tmp_path: Path) -> None:
    content = train_sentencepiece(prose(40), 200, byte_fallback=False)
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    text = "one \u2603 two"
    ids = model.encode(text)
    assert 3 in ids
    known = [len(model.id_to_piece(i).replace("\u2581", " ").encode()) for i in ids if i != 3]
    assert sum(known) < len(text.encode())
    with pytest.raises(DataError, match="0 of 256 byte pieces, train it with byte_fallback"):
        open_tokenizer(content)
    options = write_set(tmp_path, ["held out"], ["training"])
    for split in ("val", "train"):
        write_set(tmp_path, ["held out"], ["training"])
        write_published(tmp_path / f"fineweb_{split}_000000.bin", [1, 70, 3, 71, *[72] * 5])
        with pytest.raises(DataError, match=rf"fineweb_{split}_000000\.bin: token 2 is UNK"):
            import_published(tmp_path, tmp_path / "out", options)


def awkward_shard() -> Shard:
    """Documents of lengths around multiples of the context, no token twice."""
    lengths = [1, 2, CONTEXT - 1, CONTEXT, CONTEXT + 1, 5 * CONTEXT + 3, 1, 97, 3, 2 * CONTEXT]
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = np.arange(4, 4 + sum(lengths))
    tokens[starts] = 1
    return Shard(
        tokens=tokens,
        starts=starts,
        doc_bytes=np.array(lengths) + 1,
        doc_hashes=np.zeros((len(lengths), 32), dtype=np.uint8),
        flags=np.zeros(len(lengths), dtype=np.uint8),
    )


class Recorder:
    """Notes every target that is priced; a token's price is its id."""

    context, can_adapt = CONTEXT, False

    def __init__(self) -> None:
        self.targets: list[int] = []

    def price(self, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        assert tokens is None, "there are no experts"
        self.targets += batch.targets.tolist()
        return -batch.targets.double()[:, None]


def score_on_ranks(shard: Shard, part: ScorePart, world: int) -> tuple[list[Score], list[int]]:
    """Every rank's score, ranks as threads, and all targets that were priced."""
    ranks, recorders = Ranks(world), [Recorder() for _ in range(world)]

    def scorer(predictor: Any, runtime: Runtime) -> Scorer:
        return Scorer(predictor, shard, runtime, Clock(), part)

    scores = ranks.go([scorer(*pair).run for pair in zip(recorders, ranks.runtimes, strict=True)])
    return scores, [target for recorder in recorders for target in recorder.targets]


def coverage(shard: Shard, entries: list[Entry]) -> str:
    case: Any = SimpleNamespace(
        data=SimpleNamespace(val=shard), scores={"plain": Score("plain", entries)}
    )
    return rules.coverage(case).verdict


def per_document(shard: Shard, num_scored: Weights) -> list[Entry]:
    """Entries for a scorer that priced each target of the stream so many times."""
    # Target i is token i + 1; the BOS that ends a document belongs to it.
    counts = np.add.reduceat(num_scored, shard.starts)
    pairs = zip(shard.doc_bytes.tolist(), counts.tolist(), strict=True)
    return [Entry(i, 1.0, num_bytes, count) for i, (num_bytes, count) in enumerate(pairs)]


@pytest.mark.parametrize("batch_tokens", [1, 7, 64, 10**6])
def test_bug_14_tail_scored_twice(batch_tokens: int) -> None:
    shard = awkward_shard()
    num_targets, stride = shard.num_tokens - 1, CONTEXT // 4
    # The early sliding window: each of the last windows prices the last `stride` targets again.
    wrong = np.zeros(num_targets, dtype=np.int64)
    for begin in range(0, num_targets, stride):
        end = min(begin + CONTEXT, num_targets)
        wrong[max(begin, end - stride) if begin else 0 : end] += 1
    assert wrong.max() == CONTEXT // stride and wrong.sum() > num_targets
    once = np.ones(num_targets, dtype=np.int64)
    assert coverage(shard, per_document(shard, once)) == PASS
    assert coverage(shard, per_document(shard, wrong)) == FAIL
    [score], targets = score_on_ranks(shard, ScorePart(batch_tokens=batch_tokens), 1)
    # Every token but the first BOS, once, and one BOS behind the end that is not counted.
    assert targets == [*shard.tokens[1:].tolist(), 1]
    assert score.entries == [
        dataclasses.replace(e, bits=b.bits)
        for e, b in zip(per_document(shard, once), score.entries, strict=True)
    ]
    assert score.bits == pytest.approx(shard.tokens[1:].sum() / math.log(2))
    assert coverage(shard, score.entries) == PASS


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_tokens", [1, 50, 10**6])
def test_bug_15_rank_remainders_dropped(world: int, batch_tokens: int) -> None:
    shard, part = awkward_shard(), ScorePart(batch_tokens=batch_tokens)
    num_targets = shard.num_tokens - 1
    # Whole sequences, the same number on every rank: the rest is dropped without a word.
    num_kept = num_targets // CONTEXT // world * world * CONTEXT
    assert num_kept < num_targets
    wrong = (np.arange(num_targets) < num_kept).astype(np.int64)
    assert coverage(shard, per_document(shard, wrong)) == FAIL
    scores, targets = score_on_ranks(shard, part, world)
    assert sorted(t for t in targets if t != 1) == [t for t in shard.tokens.tolist() if t != 1]
    for score in scores:
        assert score.num_targets == num_targets
        assert score.num_bytes == shard.num_bytes
        assert score.bits == pytest.approx(shard.tokens[1:].sum() / math.log(2))
        assert coverage(shard, score.entries) == PASS


class Copies(Unheard):
    """Every rank seems to send what this rank sends, and as many answer as there are copies."""

    def __init__(self, num_copies: int) -> None:
        super().__init__()
        self.num_copies = num_copies

    def all_gather_object(self, object_list: list[Any], obj: object) -> None:
        object_list[:] = [obj] * self.num_copies


def test_bug_15_a_rank_that_is_missing_or_there_twice_is_refused() -> None:
    predictor: Any = Recorder()

    def score(num_copies: int) -> Score:
        runtime = Runtime(torch.device("cpu"), 0, 2, transport=Copies(num_copies))
        part = ScorePart(batch_tokens=1)
        return Scorer(predictor, awkward_shard(), runtime, Clock(), part).run()

    with pytest.raises(AssertionError, match="missed"):
        score(num_copies=1)
    with pytest.raises(RuleError, match="a rank priced target 0 instead of its own, 1"):
        score(num_copies=2)


def test_bug_16_source_bytes_over_16_bits(tmp_path: Path) -> None:
    text = "a" + 70_000 * " " + "b"
    pieces = open_tokenizer(published_model()).encode_texts([text])
    assert pieces.source_bytes.max() > 65_535 and pieces.source_bytes.sum() == len(text)
    # What the cast of the public exporter makes of it.
    assert pieces.source_bytes.astype(np.uint16).sum() == len(text) - 65_536
    train = write_jsonl(tmp_path / "train.jsonl", ["training text"])
    val = write_jsonl(tmp_path / "val.jsonl", ["short", text])
    model = write_file(tmp_path / "m.model", published_model())
    options = BuildOptions(None, [val], tokenizer=model)
    with pytest.raises(DataError, match=r"val\.jsonl: source bytes of token \d+ is 7000\d, exp"):
        build_data([train], tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    with (
        pytest.raises(
            DataError, match="document 0: source bytes of token 1 is 70001, expected 0 to 65535"
        ),
        PublishedWriter(tmp_path / "export", "val", 300, sidecar=True) as writer,
    ):
        writer.add([1, 5], [0, 70_001])
    assert list((tmp_path / "export").iterdir()) == []
