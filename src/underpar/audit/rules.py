"""One function per rule: case in, finding out. Rule ids (R01 ...) follow the contest's rules.

The audit reads the artifact, the data and the scores from files, and counts their totals again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from underpar.artifact.budget import read_budget
from underpar.audit.behaviour import (
    causality,
    decodable_order,
    normalization,
    score_before_update,
)
from underpar.audit.case import Case
from underpar.audit.finding import PASS, Finding, judge, not_shown
from underpar.codec.stream import code_documents
from underpar.core.runtime import Clock
from underpar.data.build import labelled_documents
from underpar.data.folder import hash_file
from underpar.data.sources.corpus import Reading
from underpar.errors import UnderparError
from underpar.score.scorer import Scorer
from underpar.score.tally import num_targets_of

# Largest error in fp32 of a distribution's sum, and in nats of a price in another pack.
TOLERANCE = 1e-4
# Training ends with a whole step, so slightly after its time: a share of the budget.
OVERSHOOT = 0.01
# Text for probes of methods that learn: beginnings of a few documents; more and longer on a GPU.
PROBE_DOCUMENTS, PROBE_TOKENS = 6, 160
CUDA_PROBE_DOCUMENTS, CUDA_PROBE_TOKENS = 24, 320
# Text for probes of experts: long enough that passages repeat.
HINT_TOKENS = 4096
# Precisions of matrix products, by their names in score files.
PRODUCTS = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}
# The largest relative difference of coded bits from scored bits.
CODED_TOLERANCE = 0.01


def size(case: Case) -> Finding:
    """R01: artifact and code on disk fit the cap, and so does a tokenizer beside them."""
    artifact, cap = case.artifact_file.stat().st_size, case.recipe.limits.cap_bytes
    total = read_budget(case.artifact_file.read_bytes(), case.code_bytes, cap).total_bytes
    apart = total - artifact - case.code_bytes
    beside = f" + {apart} of a tokenizer" if apart else ""
    return judge(
        "size",
        total <= cap,
        f"{artifact} + {case.code_bytes} bytes of code{beside} = {total} of {cap}, the recipe's "
        "cap",
        artifact_bytes=artifact,
        code_bytes=case.code_bytes,
        tokenizer_bytes=apart,
        cap_bytes=cap,
    )


def data_time(case: Case) -> Finding:
    """R02, R04: all work that reads training text to change the model fits the training time."""
    budget, spent = case.recipe.train.budget_seconds, sum(case.spent_seconds.values())
    parts = ", ".join(f"{name} {value:.1f}" for name, value in case.spent_seconds.items())
    if not budget:
        return judge("time", True, f"no limit in seconds; {parts}", **case.spent_seconds)
    return judge(
        "time",
        spent <= budget * (1 + OVERSHOOT),
        f"{spent:.1f} of {budget:g} seconds with training text ({parts})",
        budget_seconds=budget,
        **case.spent_seconds,
    )


def coverage(case: Case) -> Finding:
    """R12: every target of every document priced exactly once, in every score."""
    if not case.scores:
        return not_shown("coverage", "no score file in the run")
    expected = num_targets_of(case.data.val).tolist()
    wrong = {}
    for method, score in case.scores.items():
        priced = [(e.document, e.num_targets) for e in score.entries]
        if priced != list(enumerate(expected)):
            wrong[method] = len(set(priced) ^ set(enumerate(expected)))
    return judge(
        "coverage",
        not wrong,
        f"{sum(expected)} targets in {len(expected)} documents"
        + (f"; differs in {wrong}" if wrong else ", each priced once"),
        targets=sum(expected),
        wrong_documents=wrong,
    )


def byte_count(case: Case) -> Finding:
    """R13: the denominator is the size of the raw text, counted again from the text itself."""
    if not case.scores:
        return not_shown("bytes", "no score file in the run")
    shard, tokenizer = case.data.val, case.data.tokenizer
    stated = shard.doc_bytes.tolist()
    ledgers = {m: [e.num_bytes for e in s.entries] == stated for m, s in case.scores.items()}
    source = _source_bytes(case)
    from_source = "no source text to count" if source is None else f"{source} bytes in the source"
    texts = [tokenizer.decode(shard.doc(i)) for i in range(shard.num_documents)]
    same = [
        len(text) == num_bytes and hashlib.sha256(text).digest() == digest.tobytes()
        for text, num_bytes, digest in zip(texts, stated, shard.doc_hashes, strict=True)
    ]
    finding = judge(
        "bytes",
        all(ledgers.values())
        and source in (None, sum(stated))
        and (all(same) or not tokenizer.lossless),
        f"{sum(stated)} bytes scored, {sum(same)} of {len(same)} documents decode to their text, "
        + from_source,
        decoded_bytes=sum(map(len, texts)),
        source_bytes=source,
        ledgers_agree=ledgers,
    )
    if finding.verdict == PASS and not tokenizer.lossless:
        why = f"the tokenizer is lossy, so this score is not comparable: {finding.summary}"
        return not_shown("bytes", why)
    return finding


def _source_bytes(case: Case) -> int | None:
    manifest = case.data.manifest
    inputs = manifest["inputs"]
    # An imported folder was made from tokens, without text to count.
    if "reading" not in manifest:
        return None
    files = [Path(row["path"]) for row in inputs]
    if not all(
        f.exists() and hash_file(f) == row["sha256"] for f, row in zip(files, inputs, strict=True)
    ):
        return None
    fraction, reading = manifest["split"]["fraction"], Reading(**manifest["reading"])
    documents = labelled_documents(inputs, fraction, reading)
    return sum(len(document.text.encode()) for split, _, document in documents if split == "val")


def reproduction(case: Case) -> Finding:
    """R16: scoring the artifact again gives the same bits."""
    if "plain" not in case.scores:
        return not_shown("reproduction", "no plain score in the run")
    products = PRODUCTS.get(str(case.scores["plain"].how.get("products")))
    if products is None:
        return not_shown("reproduction", "the plain score does not say its precision")
    predictor, shard = case.open_predictor(products), case.data.val
    pristine = predictor.state_hash()
    again = Scorer(predictor, shard, case.runtime, Clock(), case.recipe.score).run()
    unchanged = predictor.state_hash() == pristine
    error = abs(again.bits / case.scores["plain"].bits - 1)
    return judge(
        "reproduction",
        error <= 1e-6 and unchanged,
        f"{again.bpb:.6f} against {case.scores['plain'].bpb:.6f} bits per byte; weights "
        + ("untouched" if unchanged else "CHANGED by scoring"),
        relative_error=error,
    )


def coded_bits(case: Case) -> Finding:
    """Proof of everything at once: the text decodes from as many bits as the score says."""
    if "plain" not in case.scores:
        return not_shown("coded bits", "no plain score in the run")
    shard, chosen, tokens = case.data.val, [], 0
    for index in range(shard.num_documents):
        if case.code_tokens and tokens >= case.code_tokens:
            break
        chosen.append(np.array(shard.doc(index), dtype=np.int64))
        tokens += len(chosen[-1])
    coded = code_documents(case.codec, chosen)
    scored = sum(e.bits for e in case.scores["plain"].entries[: len(chosen)])
    excess = coded / scored - 1
    return judge(
        "coded bits",
        abs(excess) <= CODED_TOLERANCE,
        f"{len(chosen)} of {shard.num_documents} documents coded and decoded: {coded} bits, "
        f"scored {scored:.0f} ({100 * excess:+.2f} %)",
        documents=len(chosen),
        coded_bits=coded,
        scored_bits=scored,
    )


RULES: tuple[Callable[[Case], Finding], ...] = (
    size,
    data_time,
    coverage,
    byte_count,
    causality,
    normalization,
    score_before_update,
    decodable_order,
    reproduction,
    coded_bits,
)


def run_audit(case: Case, on_rule: Callable[[Finding], None] | None = None) -> list[Finding]:
    """All rules in turn. An error that a rule raises is a fail, with its message as the summary."""
    findings = []
    for rule in RULES:
        started = time.perf_counter()
        try:
            finding = rule(case)
        except (UnderparError, AssertionError) as error:
            finding = judge(rule.__name__.replace("_", " "), False, f"refused: {error}")
        findings.append(replace(finding, seconds=time.perf_counter() - started))
        if on_rule:
            on_rule(findings[-1])
    return findings
