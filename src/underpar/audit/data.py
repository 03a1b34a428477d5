"""Rules on the text: whose data they are, how many bytes they have, and that nothing leaked.

No audit of a folder can prove that training saw no other text. `identity` and `splits` show that
the named data are clean; only repeated training steps (retrain.py) tie the weights to them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

from underpar.audit.case import Case
from underpar.audit.finding import DEVIATION, PASS, Finding, judge, not_shown
from underpar.data.build import labelled_documents
from underpar.data.duplicates import NearSettings, audit_duplicates
from underpar.data.folder import SPLITS, data_identity, data_sha256, hash_file, max_natural_copies
from underpar.data.shards import Shard
from underpar.data.sources.corpus import Reading
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.recipe import Recipe, read_recipe_file, to_tree

# Web text repeats itself: so large a share of the held-out documents may have copies in training.
NATURAL_SHARE = 0.005
# A near copy has this similarity. A passage is a copy too: half of a document's runs of words.
COPIES = NearSettings(threshold=0.7, threshold_containment=0.5)
# Sections of a recipe that packing leaves as they were trained.
TRAINED_SECTIONS = ("model", "train")


def identity(case: Case) -> Finding:
    """A19: run, scores and audited data name the same text, and all files the same recipe."""
    audited, sha256 = data_identity(case.data), data_sha256(case.data)
    about = case.folder.read_json(case.folder.need(case.folder.about_file))
    named = {"run.json": about.get("data_identity")}
    named |= {f"score-{m}.json": claim.get("data_identity") for m, claim in case.claims.items()}
    wrong = [name for name, value in named.items() if value != audited]
    recipe = read_recipe_file(case.folder.need(case.folder.recipe_file))
    if about.get("recipe_hash") != recipe.hash:
        wrong.append("recipe.toml")
    wrong += _other_settings(recipe, case.recipe)
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


def _other_settings(trained: Recipe, packed: Recipe) -> list[str]:
    """What the artifact's recipe says otherwise than the run's, quantization aside."""
    ours, theirs = to_tree(trained), to_tree(packed)
    wrong = [f"[{name}] of model.upar" for name in TRAINED_SECTIONS if ours[name] != theirs[name]]
    if set(ours["levers"]) != set(theirs["levers"]):
        wrong.append("[levers] of model.upar")
    return wrong


def byte_count(case: Case) -> Finding:
    """R13: the denominator is the size of the raw text, counted again from the text itself."""
    if not case.scores:
        return not_shown("bytes", "no score file in the run")
    shard, tokenizer = case.data.val, case.data.tokenizer
    stated = shard.doc_bytes.tolist()
    ledgers = {m: [e.num_bytes for e in s.entries] == stated for m, s in case.scores.items()}
    num_wrong, decoded_bytes = undecoded(shard, tokenizer)
    wrong = [f"{num_wrong} held-out documents do not decode to their text"] if num_wrong else []
    wrong += [f"score-{m}.json counts other bytes" for m, agrees in ledgers.items() if not agrees]
    source = _source_differs(case)
    wrong += [source] if source else []
    told = f"{sum(stated)} bytes in {shard.num_documents} documents"
    evidence: dict[str, Any] = {
        "decoded_bytes": decoded_bytes,
        "source": "missing" if source is None else "read",
        "ledgers_agree": ledgers,
    }
    if not tokenizer.lossless and all(ledgers.values()) and not source:
        why = "the tokenizer is lossy: not all of the text can be decoded (D8)"
        return Finding("bytes", DEVIATION, f"{told}; {why}", evidence)
    if not wrong and source is None and not case.limits.data_sha256:
        why = "their source text is missing; give --data a folder with it, or --expect-data"
        return not_shown("bytes", f"{told} decode to their text, but {why}", **evidence)
    said = "; ".join(wrong) or "decoded, hashed and counted again"
    return judge("bytes", not wrong, f"{told}: {said}", **evidence)


def undecoded(shard: Shard, tokenizer: Tokenizer) -> tuple[int, int]:
    """Documents whose tokens are not the text that the shard names, and the bytes of all texts."""
    wrong = total = 0
    for index in range(shard.num_documents):
        text = tokenizer.decode(shard.doc(index))
        digest = hashlib.sha256(text).digest()
        wrong += len(text) != shard.doc_bytes[index] or digest != shard.doc_hashes[index].tobytes()
        total += len(text)
    return wrong, total


def _source_differs(case: Case) -> str | None:
    """How the documents differ from their source: "" if they do not, None if it is missing."""
    manifest = case.data.manifest
    # A folder that was imported was made from tokens: there is no text to read.
    if "reading" not in manifest:
        return None
    files = [(Path(row["path"]), row["sha256"]) for row in manifest["inputs"]]
    if not all(file.is_file() and hash_file(file) == sha256 for file, sha256 in files):
        return None
    split, reading = manifest["split"], Reading(**manifest["reading"])
    source = {name: Counter[bytes]() for name in SPLITS}
    for name, digest, _ in labelled_documents(manifest["inputs"], split["fraction"], reading):
        source[name][digest] += 1
    shards = {"train": case.data.train, "val": case.data.val}
    for name, shard in shards.items():
        here = Counter(row.tobytes() for row in shard.doc_hashes)
        if num_other := (here - source[name]).total() + (source[name] - here).total():
            return f"{num_other} documents of {name} differ from those of the source"
    return ""


def splits(case: Case) -> Finding:
    """R06, A13: no held-out document is in training: not exactly, not nearly, not in pieces."""
    data, tokenizer = case.data, case.data.tokenizer
    num_wrong = undecoded(data.train, tokenizer)[0] if tokenizer.lossless else 0
    result = audit_duplicates(data.train, data.val, tokenizer.decode, COPIES)
    exact, near, half = (
        result["exact"]["num_across"],
        result["near"]["num_val_documents"],
        result["overlap"]["num_val_documents"],
    )
    num_val = data.val.num_documents
    natural = NATURAL_SHARE * num_val
    holds = exact <= max_natural_copies(num_val) and max(near, half) <= natural
    finding = judge(
        "splits",
        holds and not num_wrong,
        f"of {num_val} held-out documents training has {exact} exactly, {near} nearly and half of "
        f"{half} in pieces; {num_wrong} training documents do not decode to their text",
        exact=exact,
        near=near,
        undecoded=num_wrong,
        in_pieces=half,
    )
    if finding.verdict == PASS and not tokenizer.lossless:
        return not_shown("splits", f"{finding.summary}, which a lossy tokenizer cannot show")
    return finding
