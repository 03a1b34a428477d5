"""Rules on the text: whose data they are, how many bytes they have, and that nothing leaked.

No audit of a folder can prove that training saw no other text. `identity`, `splits` and
`memorization` show that the named data are clean and that the held-out text is no easier than the
training text; only repeated training steps (retrain.py) tie the weights to the data.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from underpar.audit.case import Case
from underpar.audit.finding import DEVIATION, PASS, Finding, deviates, judge, not_shown
from underpar.build.levers import plug_levers
from underpar.build.model import weight_shapes
from underpar.data.duplicates import (
    COPIES,
    PART_TOKENS,
    NearPair,
    NearSettings,
    Overlap,
    exact_duplicates,
    find_duplicates,
)
from underpar.data.folder import (
    DataFolder,
    data_identity,
    data_sha256,
    hash_file,
    max_natural_copies,
    sidecar_name,
)
from underpar.data.hold_out import BY_END, HoldOut, labelled_documents, stated_hold_out
from underpar.data.shards import CHANGED, REPAIRED, Shard, pick_documents
from underpar.data.sources.corpus import Reading
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.data.value_files import open_values
from underpar.data.workers import map_in_order, workers_for
from underpar.recipe import Recipe, read_recipe_file, to_toml, to_tree
from underpar.score.ledger import Entry
from underpar.score.method import PLAIN

# Web text repeats itself: copies may hold so large a share of the held-out bytes, and may lower the
# score by so large a share.
NATURAL_SHARE, NATURAL_GAIN = 0.005, 0.001
# A piece of the tokenizer of more bytes holds text rather than a word.
LONGEST_PIECE_BYTES = 64
# A lossy tokenizer may change so large a share of the documents beyond NFKC and spaces.
LOSSY_SHARE = 0.01
# How many standard deviations are no chance. Five: 3 of 10 million honest runs.
SIGMAS = 5.0
# Of so uneven a text, no comparison of documents says much.
LARGEST_SHARE = 0.5
# The most training documents that are scored to compare them with the held-out ones.
TRAINING_SAMPLE = 64


def identity(case: Case) -> Finding:
    """A19: run, scores and audited data name the same text, and all files the same recipe."""
    audited, sha256 = data_identity(case.data), data_sha256(case.data)
    about = case.folder.read_json(case.folder.need(case.folder.about_file))
    named = {"run.json": about.get("data_identity")}
    named |= {f"score-{m}.json": claim.get("data_identity") for m, claim in case.claims.items()}
    wrong = [name for name, value in named.items() if value != audited]
    file = case.folder.need(case.folder.recipe_file)
    recipe = read_recipe_file(file)
    # A base, or a key that the resolved recipe does not have, would be shown and not used.
    if about.get("recipe_hash") != recipe.hash or file.read_bytes() != to_toml(recipe).encode():
        wrong.append("recipe.toml")
    wrong += _other_settings(recipe, case.recipe)
    tokenizer = case.folder.need(case.folder.tokenizer_file)
    wrong += [tokenizer.name] if tokenizer.read_bytes() != case.data.tokenizer.content else []
    counted: dict[str, object] = {
        "num_weights": sum(math.prod(shape) for shape in weight_shapes(recipe).values()),
        "train_tokens": case.data.train.num_tokens,
    }
    # Runs of earlier versions do not say these.
    later = {
        "train_bytes": case.data.train.num_bytes,
        "tokenizer_identity": case.data.tokenizer.identity,
    }
    counted |= {key: value for key, value in later.items() if key in about}
    wrong += [f"{key} of run.json" for key, value in counted.items() if about.get(key) != value]
    wrong += _other_figures(case.data)
    expected = case.limits.data_sha256
    if expected and sha256 != expected.lower():
        wrong.append(f"data SHA-256 (expected {expected})")
    return judge(
        "identity",
        not wrong,
        f"data SHA-256 {sha256}, recipe {recipe.hash}"
        + (f"; other values in {', '.join(wrong)}" if wrong else ", the same in all files"),
        data_sha256=sha256,
        expected_data_sha256=expected,
        recipe_hash=recipe.hash,
        wrong=wrong,
    )


def _other_figures(data: DataFolder) -> list[str]:
    """Figures of the manifest, which `underpar data inspect` shows, that its files do not have.

    Opening the folder has compared counts and hashes.
    """
    wrong = []
    if data.manifest["tokenizer"].get("vocab_size") != data.tokenizer.vocab_size:
        wrong.append("vocab_size of manifest.json")
    for split, shard in (("train", data.train), ("val", data.val)):
        num_text_tokens = max(1, shard.num_tokens - shard.num_documents)
        figures = {
            "bytes_per_token": round(shard.num_bytes / num_text_tokens, 6),
            "changed": int(np.count_nonzero(shard.flags & CHANGED)),
            "repaired": int(np.count_nonzero(shard.flags & REPAIRED)),
            "documents_sha256": hashlib.sha256(shard.doc_hashes.tobytes()).hexdigest(),
        }
        said = data.manifest[split]
        wrong += [f"{split}.{k} of manifest.json" for k, v in figures.items() if said.get(k) != v]
    return wrong


def _other_settings(trained: Recipe, packed: Recipe) -> list[str]:
    """What the artifact's recipe says otherwise than the run's.

    Packing chooses how weights are rounded, and fits the numbers of some levers.
    """
    ours, theirs = to_tree(trained), to_tree(packed)
    sections = [name for name in ours if name not in ("quant", "levers")]
    wrong = [f"[{name}] of model.upar" for name in sections if ours[name] != theirs[name]]
    for name in sorted({*ours["levers"], *theirs["levers"]}):
        fitted = _fitted_keys(trained, name)
        tables = [tree["levers"].get(name) for tree in (ours, theirs)]
        kept = [t and {k: v for k, v in t.items() if k not in fitted} for t in tables]
        if kept[0] != kept[1]:
            wrong.append(f"[levers.{name}] of model.upar")
    return wrong


def _fitted_keys(recipe: Recipe, name: str) -> tuple[str, ...]:
    """The settings of a lever that packing fits: those of the seam `classes`."""
    lever = plug_levers(recipe, "infer").get(name)
    return ("scales", "biases") if hasattr(lever, "classes") else ()


def byte_count(case: Case) -> Finding:
    """R13: the denominator is the size of the raw text, counted again from the text itself.

    The tokens are those that the tokenizer makes of the text: other tokens could be cheaper ones.
    """
    if not case.scores:
        return not_shown("bytes", "no score file in the run")
    shard, tokenizer = case.data.val, case.data.tokenizer
    stated = shard.doc_bytes.tolist()
    ledgers = {m: [e.num_bytes for e in s.entries] == stated for m, s in case.scores.items()}
    num_wrong, decoded_bytes = undecoded(shard, tokenizer)
    wrong = [f"{num_wrong} held-out documents do not decode to their text"] if num_wrong else []
    wrong += [f"score-{m}.json counts other bytes" for m, agrees in ledgers.items() if not agrees]
    wrong += _other_tokens(case)
    source = _source_differs(case)
    wrong += [source] if source else []
    told = f"{sum(stated)} bytes in {shard.num_documents} documents"
    evidence: dict[str, Any] = {
        "decoded_bytes": decoded_bytes,
        "source": "missing" if source is None else "read",
        "ledgers_agree": ledgers,
    }
    if not wrong and source is None and not case.limits.data_sha256:
        why = "their source text is missing; give --data a folder with it, or --expect-data"
        return not_shown("bytes", f"{told} decode to their text, but {why}", **evidence)
    if not wrong and not tokenizer.lossless:
        why = "the tokenizer is lossy: not all of the text can be decoded (D8)"
        return Finding("bytes", DEVIATION, f"{told}; {why}", evidence)
    said = "; ".join(wrong) or "decoded, hashed and counted again"
    return judge("bytes", not wrong, f"{told}: {said}", **evidence)


def undecoded(shard: Shard, tokenizer: Tokenizer) -> tuple[int, int]:
    """Documents whose tokens are not the text that the shard names, and the bytes of all texts.

    A lossy tokenizer changes the documents that the shard marks.
    """
    wrong = total = 0
    start = partial(partial, _undecoded_of, tokenizer)
    for _, found in map_in_order(start, shard.parts(PART_TOKENS), workers_for(shard.num_bytes)):
        wrong += found[0]
        total += found[1]
    return wrong, total


def _undecoded_of(tokenizer: Tokenizer, job: tuple[int, Shard]) -> tuple[int, int]:
    shard = job[1]
    wrong = total = 0
    for index in range(shard.num_documents):
        text = tokenizer.decode(shard.doc(index))
        total += len(text)
        if not tokenizer.lossless and shard.flags[index] & CHANGED:
            continue
        digest = hashlib.sha256(text).digest()
        wrong += len(text) != shard.doc_bytes[index] or digest != shard.doc_hashes[index].tobytes()
    return int(wrong), total


def _other_tokens(case: Case) -> list[str]:
    """A10, A27: held-out tokens and source bytes of tokens that the tokenizer does not make."""
    shard, tokenizer = case.data.val, case.data.tokenizer
    longest = max(len(tokenizer.written([i])) for i in range(tokenizer.vocab_size))
    wrong = []
    if longest > LONGEST_PIECE_BYTES:
        wrong.append(f"a piece of the tokenizer holds {longest} bytes of text")
    # Published tokens were made by other programs; their few differences are no choice of the run.
    if not tokenizer.lossless or "reading" not in case.data.manifest:
        return wrong
    texts = [
        tokenizer.decode(shard.doc(i)).decode(errors="replace") for i in range(len(shard.starts))
    ]
    pieces = tokenizer.encode_texts(texts)
    if not np.array_equal(pieces.tokens, shard.tokens):
        wrong.append("the tokenizer makes other tokens of the held-out text")
    elif case.data.manifest["val"].get("ledger") == "sidecar":
        stated = open_values(case.data_path / sidecar_name("val"))
        if not np.array_equal(pieces.source_bytes, stated):
            wrong.append(f"{sidecar_name('val')} gives other bytes to tokens")
    return wrong


def _source_differs(case: Case) -> str | None:
    """How the documents differ from their source: "" if they do not, None if it is missing."""
    manifest = case.data.manifest
    # A folder that was imported was made from tokens: there is no text to read.
    if "reading" not in manifest:
        return None
    files = [(Path(row["path"]), row["sha256"]) for row in manifest["inputs"]]
    if not all(file.is_file() and hash_file(file) == sha256 for file, sha256 in files):
        return None
    hold_out, reading = stated_hold_out(manifest), Reading(**manifest["reading"])
    hashes: dict[str, list[bytes]] = {"train": [], "val": []}
    num_held_out = num_changed = 0
    for name, digest, document in labelled_documents(manifest["inputs"], hold_out, reading):
        hashes[name].append(digest)
        if name == "val" and not case.data.tokenizer.lossless:
            decoded = _decode(case, num_held_out)
            num_changed += _plain(document.text) != _plain(decoded)
            num_held_out += 1
    for name, shard in (("train", case.data.train), ("val", case.data.val)):
        if b"".join(hashes[name]) != shard.doc_hashes.tobytes():
            return f"the documents of {name}, or their order, differ from those of the source"
    if num_changed > LOSSY_SHARE * num_held_out:
        return f"the tokenizer changes {num_changed} held-out documents beyond NFKC and spaces"
    return _wrongly_dropped(case, hold_out, reading)


def _dropped(manifest: dict[str, Any]) -> frozenset[bytes]:
    """Hashes of the documents that the build left out as copies."""
    rows = manifest.get("dropped", {"train": [], "val": []})
    return frozenset(bytes.fromhex(row) for split in ("train", "val") for row in rows[split])


def _wrongly_dropped(case: Case, hold_out: HoldOut, reading: Reading) -> str:
    """Held-out documents may be left out if they repeat one that stays: others were hard ones."""
    if not hold_out.dropped_val:
        return ""
    all_of_them = replace(hold_out, dropped_val=frozenset(), once=False)
    labelled = labelled_documents(case.data.manifest["inputs"], all_of_them, reading)
    texts = {digest: d.text for _, digest, d in labelled if digest in hold_out.dropped_val}
    pieces = case.data.tokenizer.encode_texts(list(texts.values()))
    left_out = Shard(
        tokens=pieces.tokens,
        starts=np.cumsum(pieces.counts) - pieces.counts,
        doc_bytes=np.zeros(len(texts), dtype=np.int64),
        doc_hashes=np.zeros((len(texts), 32), dtype=np.uint8),
        flags=np.zeros(len(texts), dtype=np.uint8),
    )
    pairs, _ = find_duplicates(case.data.val, left_out, case.data.tokenizer.decode, COPIES)
    num_wrong = len(hold_out.dropped_val) - len({pair.val for pair in pairs})
    return f"{num_wrong} held-out documents were left out that repeat no other" if num_wrong else ""


def _decode(case: Case, index: int) -> str:
    shard = case.data.val
    if index >= shard.num_documents:
        return ""
    return case.data.tokenizer.decode(shard.doc(index)).decode(errors="replace")


def _plain(text: str) -> str:
    """The text as published tokenizers normalize it: NFKC, and one space for white space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def splits(case: Case) -> Finding:
    """R06, R12, A13: the split rule holds, and no held-out document is in training.

    A copy counts if it is exact, or nearly so, in any order of words, or in pieces.
    """
    data, tokenizer = case.data, case.data.tokenizer
    wrong = _breaks_split_rule(case)
    if num_undecoded := undecoded(data.train, tokenizer)[0]:
        wrong.append(f"{num_undecoded} training documents do not decode to their text")
    exact = exact_duplicates(data.train, data.val)
    if len(exact.across) > max_natural_copies(data.val.num_documents):
        wrong.append("too many exact copies")
    inside, _ = _find_copies(case, data.val, data.val)
    num_repeats = len({pair.val for pair in inside if pair.train < pair.val})
    if num_repeats > max(1, NATURAL_SHARE * data.val.num_documents):
        wrong.append(f"{num_repeats} held-out documents repeat others")
    pairs, overlaps = _find_copies(case, data.train, data.val)
    quoted = _more_quoted(case)
    near, pieces = {pair.val for pair in pairs}, {overlap.val for overlap in overlaps}
    copied = near | pieces | {val for _, val in exact.across}
    share = float(data.val.doc_bytes[sorted(copied)].sum() / max(1, data.val.num_bytes))
    if share > NATURAL_SHARE:
        wrong.append(f"copies hold {100 * share:.2f} % of the held-out bytes")
    if quoted > SIGMAS:
        wrong.append("training holds more of the held-out text than of other training text")
    gain = _gain(case, copied)
    if gain > NATURAL_GAIN:
        wrong.append(f"without copies the score is {100 * gain:.2f} % worse")
    told = (
        f"of {data.val.num_documents} held-out documents training has {len(exact.across)} exactly, "
        f"{len(near)} nearly and half of {len(pieces)} in pieces"
    )
    finding = judge(
        "splits",
        not wrong,
        "; ".join([told, *wrong]),
        exact=len(exact.across),
        near=len(near),
        in_pieces=len(pieces),
        copied_share=share,
        copied_gain=gain,
        repeated=num_repeats,
        sigmas_more_quoted=quoted,
        wrong=wrong,
    )
    if finding.verdict == PASS and _is_chosen(case):
        why = "files decide what is held out; --expect-data shows that nobody chose them for a run"
        return not_shown("splits", f"{finding.summary}; {why}", **finding.evidence)
    if finding.verdict == PASS and not tokenizer.lossless:
        # Copies were searched in what tokens decode to. That the source is what was tokenized is
        # the rule on bytes, which asks for it.
        return deviates(finding, ("D8",), "a lossy tokenizer shows its own text, not the source")
    return finding


def _find_copies(
    case: Case, train: Shard, val: Shard, settings: NearSettings = COPIES
) -> tuple[list[NearPair], list[Overlap]]:
    """Search a shard on all cores for what another has."""
    decode, workers = case.data.tokenizer.decode, workers_for(train.num_bytes)
    return find_duplicates(train, val, decode, settings, workers=workers)


def _is_chosen(case: Case) -> bool:
    """Whether the held-out documents are those that somebody chose, and not expected ones.

    The ends of documents are no choice: the rule on bytes takes them from the source again.
    """
    split = case.data.manifest["split"]
    is_chosen = split["fraction"] is None and split.get("rule") != BY_END
    return is_chosen and not case.limits.data_sha256


def _breaks_split_rule(case: Case) -> list[str]:
    """What a split by hash rules out; files that decide for themselves rule out nothing."""
    manifest = case.data.manifest
    if manifest["split"]["fraction"] is None:
        return []
    # The rule alone: what was left out as a copy has a side too.
    rule = stated_hold_out({key: row for key, row in manifest.items() if key != "dropped"})
    assert rule.val_share is not None
    wrong = []
    hashes = {"train": case.data.train.doc_hashes, "val": case.data.val.doc_hashes}
    texts = {name: {row.tobytes() for row in rows} for name, rows in hashes.items()}
    # What was left out as a copy counts where it was; the rule on bytes looks at its source.
    for digest in _dropped(manifest):
        if side := rule.split_of(digest, "train"):
            texts[side].add(digest)
    misplaced = [
        d for name, side in texts.items() for d in side if rule.split_of(d, "train") != name
    ]
    if misplaced:
        wrong.append(f"the hash of {len(misplaced)} documents belongs to the other split")
    # Hashes are random: documents that were taken out of one split leave too few of it.
    number, held_out = sum(map(len, texts.values())), len(texts["val"])
    share = rule.val_share
    spread = math.sqrt(number * share * (1 - share))
    if abs(held_out - number * share) > SIGMAS * spread:
        wrong.append(f"{held_out} of {number} texts are held out, expected {number * share:.0f}")
    return wrong


def _more_quoted(case: Case) -> float:
    """By how many standard deviations training holds more of held-out than of other documents.

    Documents of both splits are drawn alike, so training holds passages of a held-out document as
    often as of a training document that is left out. This sees copies of parts, too.
    """
    data, everything = case.data, replace(COPIES, threshold_containment=0.0)
    number = min(data.train.num_documents // 2, TRAINING_SAMPLE)
    if min(number, data.val.num_documents) < 2:
        return 0.0
    chosen = sorted(map(int, case.rng.choice(data.train.num_documents, number, replace=False)))
    others = np.setdiff1d(np.arange(data.train.num_documents), chosen).tolist()
    rest, sample = (pick_documents(data.train, indices) for indices in (others, chosen))
    shares = []
    for train, shard in ((data.train, data.val), (rest, sample)):
        share = np.zeros(shard.num_documents)
        for overlap in _find_copies(case, train, shard, everything)[1]:
            share[overlap.val] = overlap.share
        shares.append(share)
    return _sigmas_above(shares[0], shares[1])


def _sigmas_above(ours: np.ndarray, theirs: np.ndarray) -> float:
    """By how many standard deviations the mean of `ours` is above that of `theirs`."""
    if min(len(ours), len(theirs)) < 2:
        return 0.0
    error = math.sqrt(sum(values.var(ddof=1) / len(values) for values in (ours, theirs)))
    return float((ours.mean() - theirs.mean()) / error) if error else 0.0


def _gain(case: Case, copied: set[int]) -> float:
    """The share by which the plain score rises without some documents."""
    if not copied or PLAIN.label not in case.scores:
        return 0.0
    entries = case.scores[PLAIN.label].entries
    rest = [entry for entry in entries if entry.document not in copied]
    return _rate(rest) / _rate(entries) - 1 if rest else math.inf


def _rate(entries: Iterable[Entry]) -> float:
    rows = list(entries)
    return math.fsum(e.bits for e in rows) / max(1, sum(e.num_bytes for e in rows))


def memorization(case: Case) -> Finding:
    """A25: held-out text is no cheaper than training text.

    A split by hash draws the documents of both splits alike, so held-out text that is cheaper was
    trained on, or chosen because it is easy. Files that decide the split may hold easier text.
    """
    if PLAIN.label not in case.scores:
        return not_shown("memorization", "no plain score in the run")
    plain, train = case.scores[PLAIN.label], case.data.train
    number = min(train.num_documents, case.num_documents or TRAINING_SAMPLE)
    chosen = sorted(map(int, case.rng.choice(train.num_documents, number, replace=False)))
    again = case.repeat(plain, pick_documents(train, chosen))
    sigmas = _sigmas_cheaper(plain.entries, again.entries)
    evidence = {
        "held_out_bpb": _rate(plain.entries),
        "training_bpb": _rate(again.entries),
        "sigmas_cheaper": sigmas,
    }
    told = (
        f"held-out text {_rate(plain.entries):.4f} bits per byte, {number} random training "
        f"documents {_rate(again.entries):.4f}: cheaper by {sigmas:.1f} standard deviations"
    )
    if sigmas > SIGMAS and case.data.manifest["split"]["fraction"] is None:
        return not_shown("memorization", f"{told}; its files may be easier ones", **evidence)
    largest = case.data.val.doc_bytes.max() / max(1, case.data.val.num_bytes)
    if sigmas <= SIGMAS and largest > LARGEST_SHARE:
        why = (
            f"one document holds {100 * largest:.0f} % of the held-out bytes, too few to compare; "
            "'underpar data build TEXT --out DATA --split-documents 4000' cuts long documents"
        )
        return not_shown("memorization", f"{told}; {why}", **evidence)
    return judge("memorization", sigmas <= SIGMAS, told, **evidence)


def _sigmas_cheaper(held_out: list[Entry], training: list[Entry]) -> float:
    """By how many standard deviations the held-out documents are cheaper, by the byte."""
    rate = _rate([*held_out, *training])
    # What a document costs beyond its bytes at the common rate; long documents weigh more.
    costs = [np.array([e.bits - rate * e.num_bytes for e in part]) for part in (training, held_out)]
    return _sigmas_above(costs[0], costs[1])
