"""Judges a submission to Parameter Golf that this package did not make, by its files alone.

A submission is a folder with README.md, submission.json, train_gpt.py and a log per seed. Its
model is not run: rules on sizes, times, seeds and arithmetic read what the files say, and every
rule that needs the model is "not shown" with what would show it. Rule ids (R01 ...) are those of
the contest, numbers of checks (A01 ...) those of the field guide, parameter-golf issue 1017.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

from underpar.audit.acceptance import PER_TOKEN, PRACTICE, acceptance
from underpar.audit.case import DEFAULT_LIMITS, Limits
from underpar.audit.finding import (
    DEVIATION,
    FAIL,
    PASS,
    Finding,
    apply_rule,
    judge,
    not_shown,
)
from underpar.audit.logs import Log, join_logs, read_log, source_sha256
from underpar.audit.smells import Scan, Smell, parse, scan
from underpar.core.run_folder import RunFolder
from underpar.data.published.files import KNOWN_VAL
from underpar.errors import RunError, one_line
from underpar.submit.folder import README, SCRIPT
from underpar.submit.folder import SUBMISSION as ABOUT

MODEL_SUFFIXES = (".ptz", ".pt", ".bin", ".lzma", ".xz", ".br", ".zst", ".npz", ".safetensors")
COMPILED_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".h")
# Larger text files are refused: no script or description has as many bytes.
LARGEST_TEXT_BYTES = 4_000_000
MOST_FILES = 1_000
LONGEST_SUMMARY = 400
NUM_SEEDS, NUM_DOCUMENTS = 3, 50_000

# Targets of published validation sets -> source bytes, if the end of the text is dropped so that
# whole windows remain. `KNOWN_VAL` has those of the whole text.
FLOORED = {
    62_021_632: 151_080_363,  # sp1024
    45_508_608: 151_074_053,  # sp4096
    45_514_752: 151_074_924,  # sp4096, another export
    40_540_160: 151_078_222,  # sp8192
    47_851_520: 151_074_499,  # CaseOps
    151_130_112: 151_080_113,  # byte260
}
WHOLE = {targets: num_bytes for targets, num_bytes in KNOWN_VAL.values()}
WRONG = {
    9_662_464: "the first 10,000 documents alone",
    9_662_501: "the first 10,000 documents alone",
    63_779_840: "the validation set of before 2026-03-18",
}
# A window is shorter; so many targets at most are dropped at the end of the text.
LONGEST_TAIL = 65_536
# Steps of records take 0.04 to 0.13 s. A log cannot make room with a small number of steps.
LONGEST_STEP_SECONDS = 0.2
# No tokenizer here has tokens of more bytes.
LONGEST_TOKEN = 64
# Training shards of CaseOps of 10 M tokens, if the split left only 10,000 documents out (issue
# 2127): 40,000 validation documents are then in the training text.
LEAKY_SHARDS = 1_499

# Settings that differ between seeds of one configuration. A recipe's hash includes the seed.
FREE_SETTINGS = re.compile(
    r"seed|recipe|run_id|rank|local_rank|is_main_process|logfile|.*_dir|model_path|quantized_model_path"
)
# Settings that are paths: the machine may differ, the name of the file or folder may not.
DATA_SETTINGS = re.compile(r"datasets_dir|data_path|.*_files|tokenizer_path")


@dataclass(frozen=True)
class Submission:
    """The files of a submission, read once."""

    path: Path
    files: Mapping[str, int]
    about: Mapping[str, Any] | None
    script: str | None
    runs: Sequence[Log]
    scan: Scan | None
    limits: Limits = DEFAULT_LIMITS
    # Bits per byte of the runs of the record to beat.
    against: Sequence[float] = ()

    @property
    def scores(self) -> list[float]:
        """Bits per byte of all runs that logged one."""
        return [float(run.score.bpb) for run in self.runs if run.score]


def is_submission(path: Path) -> bool:
    """Whether a folder is a submission and no run folder of this package."""
    run = RunFolder(path)
    if run.recipe_file.exists() or run.about_file.exists():
        return False
    return (path / SCRIPT).is_file() or (path / ABOUT).is_file()


def open_submission(
    path: Path, limits: Limits = DEFAULT_LIMITS, against: Sequence[float] = ()
) -> Submission:
    """Read a folder; nothing in it is run or changed."""
    listed = sorted(islice(path.rglob("*"), MOST_FILES + 1))
    if len(listed) > MOST_FILES:
        raise RunError(f"{path} has more than {MOST_FILES:,} files; give the folder of one record")
    files = {
        str(file.relative_to(path)): file.stat().st_size
        for file in listed
        if file.is_file() and not file.is_symlink()
    }
    logs = [read_log(path / name) for name in files if _may_be_log(name)]
    runs = join_logs(log for log in logs if log.says_something)
    script = _read_text(path / SCRIPT) if SCRIPT in files else None
    seen = None
    if script is not None and parse(script) is not None:
        names = [name for name in files if name.endswith(".py") and name != SCRIPT]
        helpers = {name: _read_text(path / name) for name in names}
        seen = scan(SCRIPT, script, helpers, runs[0].settings if runs else {})
    about = _read_about(path / ABOUT) if ABOUT in files else None
    return Submission(path, files, about, script, runs, seen, limits, against)


def folder(case: Submission) -> Finding:
    """R19, R16: the folder holds what the contest asks for, and the script is Python."""
    missing = [name for name in (README, ABOUT, SCRIPT) if name not in case.files]
    if not any(_may_be_log(name) for name in case.files):
        missing.append("a training log")
    if case.about is None and ABOUT in case.files:
        missing.append(f"a {ABOUT} that is a JSON object")
    if case.about is not None:
        keys = [("author", "name"), ("github_id",), ("val_bpb",)]
        missing += [f"{k[0]} in {ABOUT}" for k in keys if not any(n in case.about for n in k)]
    if case.script is not None and parse(case.script) is None:
        missing.append(f"a {SCRIPT} that can be compiled")
    summary = (
        f"missing: {', '.join(missing)}" if missing else f"{len(case.files)} files, all needed"
    )
    return judge("folder", not missing, summary, missing=missing)


def size(case: Submission) -> Finding:
    """R01, A16: model and code fit the cap; four totals, each with more of the code."""
    cap, totals, problems = case.limits.cap_bytes, _totals(case), []
    for run in case.runs:
        codes = {c for c in (run.code_bytes, run.compressed_code_bytes) if c is not None}
        parts = (run.total_bytes, run.model_bytes)
        if codes and None not in parts and (parts[0] or 0) - (parts[1] or 0) not in codes:
            problems.append(f"{run.name}: total - model is not the size of the code")
    if not totals:
        return not_shown("size", "no log has sizes and no model lies here; add the packed model")
    text = ", ".join(f"{name} {number:,}" for name, number in totals.items())
    evidence = {"totals": totals, "cap_bytes": cap, "problems": problems}
    # A total that was not logged is counted from the files, and then it is the one that counts.
    first = next(iter(totals.values()))
    over = [name for name, number in totals.items() if number > cap]
    if first > cap or problems:
        return Finding("size", FAIL, "; ".join([text, *problems]), evidence)
    if over:
        return Finding("size", DEVIATION, f"{text}; over {cap:,}: {', '.join(over)}", evidence)
    return Finding("size", PASS, f"{text} of {cap:,}", evidence)


def byte_count(case: Submission) -> Finding:
    """R13, A12: loss, bits per byte and number of targets give the bytes that were divided by."""
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    open_questions: list[str] = []
    for targets, scores in _scores_by_targets(case).items():
        low = max(_interval(targets, loss, bpb)[0] for loss, bpb in scores)
        high = min(_interval(targets, loss, bpb)[1] for loss, bpb in scores)
        row: dict[str, Any] = {"targets": targets, "low": low, "high": high, "seeds": len(scores)}
        rows.append(row)
        if low > high:
            wrong.append(f"{targets:,} targets: the seeds divided by different numbers of bytes")
            continue
        expected = _expected_bytes(targets)
        row["expected"] = expected
        if expected is None:
            _judge_unknown_tokens(row, wrong, open_questions)
        elif high < expected[0] or low > expected[1]:
            share = 100 * ((low + high) / (expected[0] + expected[1]) - 1)
            wrong.append(
                f"{targets:,} targets were divided by {low:,.0f} to {high:,.0f} bytes; "
                f"the text has {expected[1]:,} ({share:+.2f} %)"
            )
    if wrong:
        return Finding("bytes", FAIL, "; ".join(wrong), {"intervals": rows})
    if not rows or open_questions:
        why = open_questions or ["no log has val_loss, val_bpb and the number of targets"]
        return not_shown("bytes", "; ".join(why), intervals=rows)
    text = ", ".join(f"{r['low']:,.0f} to {r['high']:,.0f}" for r in rows)
    return Finding("bytes", PASS, f"{text} bytes, as the text has", {"intervals": rows})


def coverage(case: Submission) -> Finding:
    """R12, A08: all 50,000 validation documents were scored, to the last target."""
    counts = {run.name: (run.num_targets, run.num_documents) for run in case.runs}
    evidence = {name: {"targets": t, "documents": d} for name, (t, d) in counts.items()}
    wrong, short, unknown = [], [], []
    for run in case.runs:
        fraction = run.settings.get("val_doc_fraction", "1.0")
        if run.num_documents not in (None, NUM_DOCUMENTS):
            wrong.append(f"{run.name} scored {run.num_documents:,} of {NUM_DOCUMENTS:,} documents")
        elif fraction not in ("1.0", "1"):
            wrong.append(f"{run.name} scored a share of {fraction:.20} of the documents")
        elif run.num_targets is None:
            unknown.append(f"{run.name} has no number of targets")
        elif run.num_targets in WRONG:
            wrong.append(f"{run.name}: {run.num_targets:,} targets, {WRONG[run.num_targets]}")
        elif _whole_of(run.num_targets) is not None:
            continue
        elif _expected_bytes(run.num_targets) is not None:
            short.append(f"{run.name} dropped targets at the end ({run.num_targets:,} left)")
        else:
            unknown.append(f"{run.name}: {run.num_targets:,} targets of an unknown tokenizer")
    if wrong:
        return Finding("coverage", FAIL, "; ".join(wrong), evidence)
    if unknown or not counts:
        why = "; ".join(unknown or ["no log"])
        return not_shown("coverage", f"{why}; needs the token files", **evidence)
    if short:
        return Finding("coverage", DEVIATION, "; ".join(short), evidence)
    return Finding("coverage", PASS, "all targets of the validation set, in every log", evidence)


def claims(case: Submission) -> Finding:
    """R16: the numbers in submission.json are those of the logs."""
    about, scores = case.about or {}, case.scores
    wrong, num_compared = [], 0
    bpb = _number(about.get("val_bpb"))
    if bpb is not None and scores:
        num_compared += 1
        if not any(_agree(bpb, value) for value in (*scores, *_means(case))):
            wrong.append(f"val_bpb {bpb:g}, the logs have {fmean(scores):.8f} on average")
    totals = [run.total_bytes for run in case.runs if run.total_bytes is not None]
    stated = [_number(about.get(k)) for k in ("bytes_total", "artifact_bytes_max")]
    for value in (v for v in stated if v is not None and totals):
        num_compared += 1
        if not min(totals) <= value:
            wrong.append(f"{value:,.0f} bytes in all, the logs have {max(totals):,}")
    for seed, row in _stated_seeds(about).items():
        logged = [run.score.bpb for run in case.runs if run.score and run.seed == seed]
        stated_bpb = _number(row.get("val_bpb"))
        if not logged or stated_bpb is None:
            continue
        num_compared += 1
        if not any(_agree(stated_bpb, float(value)) for value in logged):
            wrong.append(f"seed {seed}: val_bpb {stated_bpb:g}, its log has {', '.join(logged)}")
    if wrong:
        return Finding("claims", FAIL, "; ".join(wrong), {"logged": scores})
    if not num_compared:
        return not_shown("claims", f"no number of {ABOUT} can be compared with a log")
    return Finding(
        "claims", PASS, f"{num_compared} numbers agree with the logs", {"logged": scores}
    )


def seeds(case: Submission) -> Finding:
    """R15, A19: at least three runs of one script with one configuration, and all are shown."""
    names = [run.seed for run in case.runs]
    wrong, missing = [], []
    for key, values in sorted(_differing_settings(case.runs).items()):
        wrong.append(f"{key} differs between logs ({', '.join(sorted(values))})")
    for what, digests in (
        ("bytes of code", {run.code_bytes for run in case.runs if run.code_bytes}),
        ("source", {run.source_sha256 for run in case.runs if run.source_sha256}),
        ("number of targets", {run.num_targets for run in case.runs if run.num_targets}),
        ("number of shards", {r.num_train_shards for r in case.runs if r.num_train_shards}),
    ):
        if len(digests) > 1:
            wrong.append(f"{what} differs between logs")
    losses = [run.losses_sha256 for run in case.runs if run.losses_sha256]
    if len(losses) > len(set(losses)):
        wrong.append("two logs have the same training losses")
    stated = set(_stated_seeds(case.about or {}))
    if lost := sorted(stated - set(names)):
        wrong.append(f"no log of seed {', '.join(map(str, lost))}, which {ABOUT} names")
    distinct = {seed for seed in names if seed is not None}
    if stated and (unnamed := sorted(distinct - stated)):
        missing.append(
            f"{ABOUT} does not name seed {', '.join(map(str, unnamed))}, which has a log"
        )
    again = sorted({str(seed) for seed in names if seed is not None and names.count(seed) > 1})
    if again:
        missing.append(f"seed {', '.join(again)} has several logs")
    if len(distinct) < NUM_SEEDS:
        missing.append(f"{len(distinct)} of {NUM_SEEDS} seeds have logs")
    sources = {run.source_sha256 for run in case.runs if run.source_sha256}
    if case.script is not None and sources and source_sha256(case.script) not in sources:
        missing.append(f"the logs are of another text than {SCRIPT}")
    text = f"seeds {', '.join(map(str, names))}: one script, one configuration"
    evidence = {"seeds": names, "bpb": case.scores}
    if wrong:
        return Finding("seeds", FAIL, "; ".join(wrong), evidence)
    if missing:
        return not_shown("seeds", "; ".join(missing), **evidence)
    return Finding("seeds", PASS, text, evidence)


def training_time(case: Submission) -> Finding:
    """R02, R04, A17: training, and calibration on training text after it, take 600 s."""
    limit, wrong, over = case.limits.train_seconds, [], []
    rows: list[dict[str, Any]] = []
    for run in case.runs:
        if run.train_seconds is None:
            continue
        # The last step may begin within the time and end after it.
        step = min(
            LONGEST_STEP_SECONDS, run.train_seconds / run.num_steps if run.num_steps else 0.0
        )
        total = run.train_seconds + (run.hessian_seconds or 0.0)
        rows.append({"log": run.name, "loop": run.train_seconds, "with_calibration": total})
        if run.train_seconds > limit + step:
            wrong.append(f"{run.name}: {run.train_seconds:.3f} s")
        elif total > limit + (0.0 if run.hessian_seconds else step):
            over.append(f"{run.name}: {total:.1f} s with calibration")
    if wrong:
        return Finding("time", FAIL, f"{'; '.join(wrong)}; limit {limit:g} s", {"runs": rows})
    if len(rows) < max(1, len(case.runs)):
        return not_shown("time", "a log without train_time in milliseconds", runs=rows)
    if over:
        return Finding("time", DEVIATION, f"{'; '.join(over)}; limit {limit:g} s", {"runs": rows})
    longest = max(row["with_calibration"] for row in rows)
    return Finding("time", PASS, f"at most {longest:.1f} of {limit:g} s", {"runs": rows})


def scoring_time(case: Submission) -> Finding:
    """R03, A17, A30: scoring takes 600 s, with what its clock may leave out."""
    limit, wrong, over = case.limits.score_seconds, [], []
    rows: list[dict[str, Any]] = []
    for run in case.runs:
        if run.eval_seconds is None:
            continue
        # Hints are computed from the text that is scored: that is scoring (A30). A log may not say
        # whether the clock ran.
        outside = run.settings.get("ngram_hint_precompute_outside")
        hints = run.hint_seconds or 0.0
        clocked = run.eval_seconds + (hints if outside == "True" else 0.0)
        unclocked = 0.0 if outside else hints
        total = clocked + unclocked + (run.load_seconds or 0.0) + (run.warm_up_seconds or 0.0)
        rows.append({"log": run.name, "clocked": clocked, "with_loading": total})
        if clocked > limit:
            wrong.append(f"{run.name}: {clocked:.1f} s")
        elif total > limit:
            over.append(f"{run.name}: {total:.1f} s with loading and warm-up")
    evidence = {"runs": rows}
    if wrong:
        return Finding("scoring time", FAIL, f"{'; '.join(wrong)}; limit {limit:g} s", evidence)
    if len(rows) < max(1, len(case.runs)):
        return not_shown("scoring time", "a log without the seconds of scoring", runs=rows)
    if over:
        return Finding("scoring time", DEVIATION, f"{'; '.join(over)}; limit {limit:g} s", evidence)
    longest = max(row["with_loading"] for row in rows)
    return Finding("scoring time", PASS, f"at most {longest:.1f} of {limit:g} s", evidence)


def selection(case: Submission) -> Finding:
    """R11, R17, A29: how often the validation text was scored, and that none was chosen after."""
    counts = {run.name: len(run.validations) for run in case.runs}
    repeated, chosen = [], []
    for run in case.runs:
        score = run.score
        if score is None:
            continue
        # The same pass may be printed twice, once with fewer digits.
        same = [float(v.bpb) for v in run.passes if v.method == score.method]
        others = [bpb for bpb in same if not math.isclose(bpb, float(score.bpb), abs_tol=6e-5)]
        if others:
            repeated.append(f"{run.name} has {1 + len(others)} scores named {score.method}")
        rows = _stated_seeds(case.about or {})
        stated = None if run.seed is None else _number(rows.get(run.seed, {}).get("val_bpb"))
        if stated is not None and any(_agree(stated, bpb) for bpb in others if bpb == min(same)):
            chosen.append(f"{run.name}: the lowest of {1 + len(others)} scores is claimed")
    if chosen:
        return Finding("selection", FAIL, "; ".join(chosen), {"passes": counts})
    if repeated or not sum(counts.values()):
        why = "; ".join(repeated) or "no log has a pass over the validation text"
        return not_shown("selection", f"{why}; needs a log of every score", passes=counts)
    text = f"{sum(counts.values())} logged passes over the validation text in {len(counts)} logs"
    return Finding("selection", PASS, text, {"passes": counts})


def splits(case: Submission) -> Finding:
    """R06, A13: training text holds no validation documents, as far as logs can tell."""
    shards = {run.name: run.num_train_shards for run in case.runs}
    if LEAKY_SHARDS in shards.values():
        return judge(
            "splits",
            False,
            f"{LEAKY_SHARDS} training shards: 40,000 validation documents are among them "
            "(parameter-golf issue 2127)",
            shards=shards,
        )
    why = "logs cannot show it; hashes of all documents of both splits would (underpar data audit)"
    return not_shown("splits", why, shards=shards)


def significance(case: Submission) -> Finding:
    """R14, A20: the gain over the record before meets the README's rule, or that of practice."""
    if not case.against:
        return not_shown("significance", "name the record to beat: --against FOLDER or its scores")
    if len(case.scores) < 2 or len(case.against) < 2:
        return not_shown("significance", "needs the scores of two runs or more per side")
    rules = acceptance(case.against, case.scores, _bytes_per_token(case))
    by_name = {rule.rule: rule for rule in rules}
    gain = fmean(case.against) - fmean(case.scores)
    text = f"gain {gain:.5f} bits per byte; " + "; ".join(
        f"{rule.rule}: {'not shown' if rule.is_met is None else rule.why}" for rule in rules
    )
    evidence = {"gain_bpb": gain, "acceptance": [rule.as_dict() for rule in rules]}
    if by_name[PER_TOKEN].is_met:
        return Finding("significance", PASS, text, evidence)
    if by_name[PRACTICE].is_met is None:
        return not_shown("significance", text, **evidence)
    verdict = DEVIATION if by_name[PRACTICE].is_met else FAIL
    return Finding("significance", verdict, text, evidence)


def download(case: Submission) -> Finding:
    """R05, R18: the code that runs opens no network and installs nothing. A hint, no proof."""
    seen = case.scan
    return _hints("downloads", seen, *((seen.downloads, seen.downloads_off) if seen else ((), ())))


def static_scan(case: Submission) -> Finding:
    """A22: patterns of invalid scoring in the code that runs. Hints, never a verdict."""
    seen = case.scan
    return _hints("static scan", seen, *((seen.smells, seen.smells_off) if seen else ((), ())))


# What no file of a submission shows, and what would.
UNSEEN = {
    "causality": "R08: score text whose later tokens change, or decode the score (A01, A04)",
    "normalization": "R09: price every token at one place; the sum must be 1 (A02, A03)",
    "score before update": "R07, R10: one log of all scores and updates, in order (A05)",
    "order": "R12: which document each score depends on (A07), or a decoder",
    "validation influence": "R06, R20, R21: train twice with other validation files (A14, A18)",
    "sealed scoring": "R05: score without network and training text (A15)",
    "reproduction": "R16: score the packed model again, elsewhere (A21)",
}

Rule = Callable[[Submission], Finding]
SUBMISSION_RULES: dict[str, Rule] = {
    "folder": folder,
    "size": size,
    "bytes": byte_count,
    "coverage": coverage,
    "claims": claims,
    "seeds": seeds,
    "time": training_time,
    "scoring time": scoring_time,
    "selection": selection,
    "splits": splits,
    "significance": significance,
    "downloads": download,
    "static scan": static_scan,
}


def judge_submission(case: Submission) -> list[Finding]:
    """All rules in turn, then what no file can show."""
    findings = []
    for name, rule in SUBMISSION_RULES.items():
        finding = apply_rule(name, partial(rule, case))
        # Names and logs of others may hold control characters.
        summary = one_line(finding.summary, LONGEST_SUMMARY)
        findings.append(replace(finding, summary=summary))
    return findings + [
        not_shown(name, f"needs more than files. {why}") for name, why in UNSEEN.items()
    ]


def _hints(
    rule: str, seen: Scan | None, hints: Iterable[Smell], switched_off: Iterable[Smell]
) -> Finding:
    if seen is None:
        return not_shown(rule, f"no {SCRIPT} that can be read")
    rows = [vars(hint) for hint in hints]
    off = [vars(hint) for hint in switched_off]
    evidence = {"hints": rows, "switched_off": off, "unread": seen.unread}
    if seen.unread:
        return not_shown(rule, f"code is hidden in {', '.join(seen.unread)}", **evidence)
    if rows:
        text = "; ".join(f"{row['file']}:{row['line']} {row['text']}" for row in rows[:3])
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        return not_shown(rule, f"to be read by a person: {text}{more}", **evidence)
    text = f"no hint in {seen.num_lines:,} lines that can run"
    text += f"; {len(off)} in code that the logged settings switch off" if off else ""
    return Finding(rule, PASS, text, evidence)


def _totals(case: Submission) -> dict[str, int]:
    """Bytes of model and code: as logged, with the script as it lies here, helpers, tokenizer."""
    totals = {}
    logged = [run.total_bytes for run in case.runs if run.total_bytes is not None]
    if logged:
        totals["as logged"] = max(logged)
    models = [run.model_bytes for run in case.runs if run.model_bytes is not None]
    models += [size for name, size in case.files.items() if name.endswith(MODEL_SUFFIXES)]
    if not models or SCRIPT not in case.files:
        return totals
    total = max(models) + case.files[SCRIPT]
    totals["with the script as it is"] = total
    if case.scan:
        names = set(case.scan.helpers)
        texts = case.scan.texts.values()
        for name in case.files:
            is_named = any(Path(name).name in text for text in texts)
            if name.endswith(COMPILED_SUFFIXES) and is_named:
                names.add(name)
        total += sum(case.files[name] for name in names)
        totals["with helper sources"] = total
    tokenizers = [n for n in case.files if n.endswith((".model", ".vocab")) or "tokenizer" in n]
    totals["with the tokenizer"] = total + sum(
        case.files[n] for n in tokenizers if not n.endswith(".py")
    )
    return totals


def _scores_by_targets(case: Submission) -> dict[int, list[tuple[str, str]]]:
    groups: dict[int, list[tuple[str, str]]] = {}
    for run in case.runs:
        if run.score and run.num_targets:
            whole = _whole_of(run.num_targets)
            score = (run.score.loss, run.score.bpb)
            groups.setdefault(whole or run.num_targets, []).append(score)
    return groups


def _interval(targets: int, loss: str, bpb: str) -> tuple[float, float]:
    """The numbers of bytes that give these printed numbers, which were rounded to their digits."""
    half_loss, half_bpb = (0.5 * 10.0 ** -_num_digits(text) for text in (loss, bpb))
    scale = targets / math.log(2)
    low = (float(loss) - half_loss) * scale / (float(bpb) + half_bpb)
    lowest_bpb = float(bpb) - half_bpb
    high = (float(loss) + half_loss) * scale / lowest_bpb if lowest_bpb > 0 else 1e18
    return low, high


def _num_digits(text: str) -> int:
    return len(text.partition(".")[2])


def _whole_of(targets: int) -> int | None:
    """The targets of the whole text, whether a log counts its first token or not."""
    return next((t for t in (targets, targets - 1) if t in WHOLE), None)


def _expected_bytes(targets: int) -> tuple[int, int] | None:
    """The least and the most source bytes of so many targets of a published tokenizer."""
    whole = _whole_of(targets)
    if whole is not None:
        return WHOLE[whole], WHOLE[whole]
    if targets in FLOORED:
        return FLOORED[targets], FLOORED[targets]
    for all_targets, num_bytes in WHOLE.items():
        dropped = all_targets - targets
        if 0 < dropped < LONGEST_TAIL:
            return num_bytes - LONGEST_TOKEN * dropped, num_bytes
    return None


def _judge_unknown_tokens(row: dict[str, Any], wrong: list[str], open_questions: list[str]) -> None:
    """Bytes of a tokenizer that is not published: the text has the same bytes for every one."""
    most = max(WHOLE.values())
    if row["low"] > most * 1.001:
        share = 100 * (row["low"] / most - 1)
        wrong.append(
            f"{row['targets']:,} targets were divided by {row['low']:,.0f} bytes or more; "
            f"the text has {most:,} ({share:+.2f} %)"
        )
    elif not any(row["low"] <= total <= row["high"] for total in WHOLE.values()):
        open_questions.append(
            f"{row['targets']:,} targets of an unknown tokenizer were divided by "
            f"{row['low']:,.0f} to {row['high']:,.0f} bytes; needs the token files"
        )


def _bytes_per_token(case: Submission) -> float | None:
    counts = [run.num_targets for run in case.runs if run.num_targets]
    expected = _expected_bytes(counts[0]) if counts else None
    return expected[1] / counts[0] if expected else None


def _differing_settings(runs: Sequence[Log]) -> dict[str, set[str]]:
    """Settings that logs state differently, with their values."""
    differing = {}
    for key in {key for run in runs for key in run.settings}:
        if FREE_SETTINGS.fullmatch(key) and not DATA_SETTINGS.fullmatch(key):
            continue
        values = {run.settings[key] for run in runs if key in run.settings}
        if DATA_SETTINGS.fullmatch(key):
            values = {value.rstrip("/").rpartition("/")[2] for value in values}
        if len(values) > 1:
            differing[key] = {value[:40] for value in values}
    return differing


def _means(case: Submission) -> Iterator[float]:
    """Means of all logs, and of one log per seed if seeds were run again or are left out."""
    yield fmean(case.scores)
    by_seed: dict[int | None, list[float]] = {}
    stated = _stated_seeds(case.about or {})
    for run in case.runs:
        if run.score and (not stated or run.seed in stated):
            by_seed.setdefault(run.seed, []).append(float(run.score.bpb))
    if by_seed and math.prod(map(len, by_seed.values())) <= 4_096:
        yield from map(fmean, product(*by_seed.values()))


def _stated_seeds(about: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Seeds of submission.json with what it says of each."""
    stated: dict[int, Mapping[str, Any]] = {}
    for value in (about.get("seeds"), about.get("seed_results")):
        if isinstance(value, list):
            stated |= {seed: {} for seed in value if isinstance(seed, int)}
        for name, row in value.items() if isinstance(value, dict) else ():
            number = re.fullmatch(r"(?:seed[_-]?)?([0-9]{1,18})", str(name))
            if number and isinstance(row, dict):
                stated[int(number[1])] = row
    return stated


def _agree(stated: float, logged: float) -> bool:
    """Whether a stated number is a logged one, rounded to the digits that it is stated with."""
    return abs(stated - logged) <= 0.5 * 10.0 ** -_num_digits(repr(stated)) + 1e-8


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e15 else None


def _may_be_log(name: str) -> bool:
    path = Path(name)
    is_text = path.suffix == ".txt" and not re.match(
        "requirements|license|notice", path.name.lower()
    )
    return path.suffix == ".log" or is_text


def _read_text(path: Path) -> str:
    if path.stat().st_size > LARGEST_TEXT_BYTES:
        raise RunError(f"{path} has more than {LARGEST_TEXT_BYTES:,} bytes; a source has fewer")
    raw = path.read_bytes()
    # A packed script may hold any byte; its first line then names the encoding.
    encoding = "latin-1" if re.match(rb"#\s*coding[:=]\s*latin-1", raw) else "utf-8"
    return raw.decode(encoding, "replace")


def _read_about(path: Path) -> Mapping[str, Any] | None:
    try:
        tree = json.loads(_read_text(path))
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None
