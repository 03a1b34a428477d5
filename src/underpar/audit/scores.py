"""Rules on score files: they are well formed, complete, repeatable, and made in time.

A score file is a claim. It is believed if the audit scores the text again by the same method and
finds the same bits, document by document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from underpar.audit.case import Case, Repeated
from underpar.audit.finding import PASS, Finding, judge, not_shown
from underpar.build.levers import plug_levers
from underpar.codec.stream import code_documents, code_first
from underpar.core.makers import again
from underpar.core.versions import device_name
from underpar.data.shards import pick_documents
from underpar.data.xz import xz_bytes
from underpar.errors import RuleError
from underpar.recipe import to_tree
from underpar.score.ledger import Entry, Score
from underpar.score.method import ADAPT, COUNT_BITS, STOP_BITS, method_from_dict
from underpar.score.tally import num_targets_of

# The largest relative difference of a repeated score: in fp32 without learning, and otherwise. The
# second is the tolerance of the field for another machine (A21 of the field guide). Between both a
# score is "not shown", unless the GPU that it names repeats it.
SAME, NEARLY_SAME = 1e-6, 2e-4
# One document may differ by this share of its bits, and by this many bits.
DOCUMENT_SHARE, DOCUMENT_BITS = 0.01, 1.0
# The largest relative difference of coded bits from scored bits.
CODED_TOLERANCE = 0.01
# The same with adapters, where more is coded the same way, and what the end of the last document
# may cost: it is coded and not scored.
ADAPTED_TOLERANCE, END_BITS = 0.002, 64.0
# With a limit of tokens, one in so many is coded with adapters.
ADAPTED_SHARE = 4


def score_files(case: Case) -> Finding:
    """R11, R15: each score file is one method's, says so in its name, and has possible figures."""
    if not (case.scores or case.refused):
        return not_shown("score files", "no score file in the run")
    wrong = dict(case.refused)
    for label, score in case.scores.items():
        if why := _impossible(case, score) or _misstated(case, label):
            path = case.folder.score_file(label)
            wrong[path.name] = f"{why}; {again(path)}"
    said = "; ".join(f"{name}: {why}" for name, why in wrong.items())
    return judge(
        "score files",
        not wrong,
        said or f"{len(case.scores)}, each named after its method: {', '.join(case.scores)}",
        methods=sorted(case.scores),
        wrong=wrong,
    )


def _impossible(case: Case, score: Score) -> str:
    """Why no honest scorer could have written this score; "" if one could."""
    how = {k: v for k, v in score.how.items() if k not in ("settings", "score", "products")}
    method = method_from_dict(how)
    if method.name not in ("", ADAPT.name):
        return f"methods have no names of their own, this one says {method.name!r:.40}"
    if len(set(method.levers)) != len(method.levers):
        return "it names a lever twice"
    if method.name == ADAPT.name and method.levers != tuple(plug_levers(case.recipe, "infer")):
        return f"its levers are {', '.join(method.levers)}, not those of the recipe"
    if method.name == ADAPT.name and not _has_recipe_settings(case, score):
        return "it is named adapt, and its settings are not those of the recipe"
    if score.method != method.label:
        return f"it was made by {method.label}, and says {score.method!r:.40}"
    if score.order != method.order:
        return f"its order is {method.order}, and it says {score.order!r:.40}"
    if any(not _is_possible(entry) for entry in score.entries):
        return "bits of a document are not positive and finite"
    if score.side_bits != _side_bits(score):
        return f"{score.side_bits:g} bits of side information do not belong to its method"
    return ""


def _side_bits(score: Score) -> float:
    """What a decoder has to be told: where learning stopped, how many chunks there are."""
    levers = score.how.get("settings", {}).values()
    counts = any(settings.get("cosine") for settings in levers)
    return STOP_BITS * (score.stopped_at >= 0) + COUNT_BITS * counts


def _has_recipe_settings(case: Case, score: Score) -> bool:
    how, part = score.how, case.recipe.score
    settings = {name: case.recipe.levers[name] for name in how["levers"]}
    windows = {"stride": part.stride, "flat": part.flat, "order": part.order}
    same = all(how.get(key) == value for key, value in windows.items())
    same &= how.get("score") == to_tree(case.recipe)["score"]
    return bool(same and how.get("settings") == settings)


def _misstated(case: Case, label: str) -> str:
    """What a score file says wrongly of the artifact and of the text; "" if nothing."""
    counted = {
        "artifact_bytes": case.folder.artifact_file.stat().st_size,
        "xz_bytes": xz_bytes(case.data.val, case.data.tokenizer),
        "lossless": case.data.tokenizer.lossless,
    }
    wrong = [key for key, value in counted.items() if case.claims[label][key] != value]
    return f"its {', '.join(wrong)} are other ones" if wrong else ""


def _is_possible(entry: Entry) -> bool:
    if not entry.num_targets:
        return entry.bits == 0
    return math.isfinite(entry.bits) and entry.bits > 0


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


def reproduction(case: Case) -> Finding:
    """R16: scoring the artifact again, by the method of each score, gives the same bits.

    All documents are scored again, or random ones if the auditor asks for fewer and documents do
    not depend on each other. A score is compared document by document and as a sum.
    """
    if not case.scores:
        return not_shown("reproduction", "no score file in the run")
    rows = {method: _compare(case, score) for method, score in case.scores.items()}
    wrong = [method for method, row in rows.items() if row["wrong"]]
    told = ", ".join(f"{m} {row['bpb']:.6f} in {row['documents']}" for m, row in rows.items())
    said = "".join(f"; {method} differs: {rows[method]['wrong']}" for method in wrong)
    told = f"scored again, bits per byte and documents: {told} of {case.data.val.num_documents}"
    least = min(len(_repeat(case, score)[0]) for score in case.scores.values())
    if least < case.data.val.num_documents:
        told += f" (of a sample: up to {100 * (1 - 0.05 ** (1 / least)):.0f} % may differ unseen)"
    if unsure := [method for method, row in rows.items() if row["unsure"]]:
        said += f"; {', '.join(unsure)} differs by a little, which on its own CPU it would not"
    if unsure and not wrong:
        return not_shown("reproduction", f"{told}{said}", scores=rows)
    return judge("reproduction", not wrong, f"{told}{said}", scores=rows)


def _repeat(case: Case, score: Score) -> Repeated:
    """A score again, once in an audit."""
    if score.method not in case.repeated:
        chosen = _choose(case, score)
        again = case.repeat(score, pick_documents(case.data.val, chosen))
        case.repeated[score.method] = chosen, again
    return case.repeated[score.method]


def _compare(case: Case, score: Score) -> dict[str, Any]:
    """Figures of a repeated score, and what is wrong with its file ("" if nothing)."""
    chosen, again = _repeat(case, score)
    # The last document of a shard has one target less, also in the shard of chosen documents.
    claimed = [score.entries[index] for index in chosen if index < len(score.entries)]
    error = _relative(again.entries, claimed)
    is_fp32, learns = score.how.get("products") == "torch.float32", score.how.get("levers")
    tolerance = SAME if is_fp32 and not learns else NEARLY_SAME
    num_other = num_other_documents(again.entries, claimed)
    row = {
        "bpb": again.bpb,
        "documents": len(again.entries),
        "targets": again.num_targets,
        "relative_error": error,
        "tolerance": tolerance,
        "other_documents": num_other,
        "seconds": sum(again.seconds.values()),
        "wrong": "",
        # One CPU gives the same floats twice; who wants more room can name another machine.
        "unsure": SAME < error <= tolerance and not _is_of_this_gpu(case, score),
    }
    if num_other:
        row["wrong"] = f"{num_other} documents have other bits"
    elif error > tolerance:
        row["wrong"] = f"the sum differs by {error:.1e}"
    elif len(chosen) == len(score.entries) and _ends(again) != _ends(score):
        row["wrong"] = "its events came in another order"
    return row


def _is_of_this_gpu(case: Case, score: Score) -> bool:
    device = case.runtime.device
    return device.type == "cuda" and case.claims[score.method]["device"] == device_name(device)


def _ends(score: Score) -> tuple[Any, ...]:
    """What happened besides pricing, and what a decoder must be told of it."""
    return score.events, score.stopped_at, score.side_bits


def _choose(case: Case, score: Score) -> list[int]:
    """The documents to score again. The last one is always among them, as it has no end."""
    total = case.data.val.num_documents
    depends = score.how.get("levers") or score.how.get("flat")
    if depends or not 0 < case.num_documents < total:
        return list(range(total))
    chosen = case.rng.choice(total - 1, case.num_documents, replace=False)
    return [*sorted(map(int, chosen)), total - 1]


def num_other_documents(again: list[Entry], claimed: list[Entry]) -> int:
    """Documents whose repeated bits, targets or bytes are not those that are claimed."""
    wrong = abs(len(again) - len(claimed))
    for ours, theirs in zip(again, claimed, strict=False):
        allowed = DOCUMENT_SHARE * ours.bits + DOCUMENT_BITS
        same = ours.num_targets == theirs.num_targets and ours.num_bytes == theirs.num_bytes
        # Written so that NaN counts as another value.
        wrong += not (same and abs(ours.bits - theirs.bits) <= allowed)
    return wrong


def _relative(again: list[Entry], claimed: list[Entry]) -> float:
    ours, theirs = (math.fsum(e.bits for e in entries) for entries in (again, claimed))
    return abs(theirs / ours - 1) if ours else math.inf


def scoring_time(case: Case) -> Finding:
    """R03: scoring fits its time, by the clock of its file and by the clock of the audit.

    From the first byte of the artifact that is read to the last price: loading and warm-up count.
    The limit is the auditor's, or the recipe's own if that is tighter.
    """
    if not case.scores:
        return not_shown("scoring time", "no score file in the run")
    limit = min(case.recipe.limits.score_seconds or math.inf, case.limits.score_seconds)
    claimed = {m: sum(score.seconds.values()) for m, score in case.scores.items()}
    bad = {m: s for m, s in claimed.items() if not 0 < s <= limit}
    ours = {}
    for method, score in case.scores.items():
        _, again = _repeat(case, score)
        share = again.num_targets / max(1, score.num_targets)
        load = again.seconds.get("load", 0.0)
        ours[method] = load + (sum(again.seconds.values()) - load) / share
    told = ", ".join(f"{m} {_spell(case.scores[m])} (again: {ours[m]:.1f})" for m in claimed)
    evidence = {"seconds": claimed, "repeated_seconds": ours, "limit_seconds": limit}
    finding = judge("scoring time", not bad, f"{told} of {limit:g} seconds", **evidence)
    if finding.verdict == PASS and max(ours.values()) > limit:
        why = "repeating took longer here; audit on the machine of the score"
        return not_shown("scoring time", f"{finding.summary}; {why}", **evidence)
    return finding


def _spell(score: Score) -> str:
    """The seconds of a score, and of them those before the first price."""
    ahead = {name: score.seconds[name] for name in ("load", "warm-up") if name in score.seconds}
    of_them = ", ".join(f"{name} {seconds:.1f}" for name, seconds in ahead.items())
    return f"{sum(score.seconds.values()):.1f}" + (f", of them {of_them}" if of_them else "")


def coded_bits(case: Case) -> Finding:
    """Proof of everything at once: the text decodes from as many bits as the scores say.

    Random documents by the plain score, and the first documents by each score that adapts, because
    adapters go through a text from its start. A score that no codec follows is named: not shown.
    """
    if "plain" not in case.scores:
        return not_shown("coded bits", "no plain score in the run")
    rows = {"plain": _code_plain(case)}
    not_coded = {}
    for label, score in case.scores.items():
        if label == "plain":
            continue
        try:
            rows[label] = _code_adapted(case, score)
        except RuleError as error:
            not_coded[label] = str(error)
    wrong = [label for label, row in rows.items() if not row["passed"]]
    told = "; ".join(
        f"{label}: {row['documents']} of {case.data.val.num_documents} documents coded and "
        f"decoded, {row['coded_bits']} bits, scored {row['scored_bits']:.0f} "
        f"({100 * row['excess']:+.2f} %)"
        for label, row in rows.items()
    )
    told += "".join(f"; not decoded: {why}" for why in not_coded.values())
    plain = rows["plain"]
    evidence = {
        "documents": plain["chosen"],
        "coded_bits": plain["coded_bits"],
        "scored_bits": plain["scored_bits"],
        "scores": rows,
        "not_coded": not_coded,
    }
    if not_coded and not wrong:
        return not_shown("coded bits", told, **evidence)
    return judge("coded bits", not wrong, told, **evidence)


def _code_plain(case: Case) -> dict[str, Any]:
    shard, chosen, tokens = case.data.val, [], 0
    for index in map(int, case.rng.permutation(shard.num_documents)):
        if case.code_tokens and tokens >= case.code_tokens:
            break
        chosen.append(index)
        tokens += len(shard.doc(index))
    coded = code_documents(case.codec, _documents(case, sorted(chosen)))
    scored = sum(case.scores["plain"].entries[index].bits for index in chosen)
    return _coded(sorted(chosen), coded, scored, CODED_TOLERANCE * scored)


def _code_adapted(case: Case, score: Score) -> dict[str, Any]:
    """The first documents of a score that adapts; a RuleError if it cannot be coded."""
    if score.stopped_at >= 0:
        raise RuleError(f"{score.method} stopped learning by its clock")
    adaptation, shard = case.open_adaptation(score), case.data.val
    ends = np.append(shard.starts[1:], shard.num_tokens)
    # Adapters make a token several times as slow.
    most = case.code_tokens // ADAPTED_SHARE or shard.num_tokens
    num = min(shard.num_documents, 1 + int(np.searchsorted(ends, most)))
    if adaptation.experts and num < shard.num_documents:
        raise RuleError("experts share what they learn: only the whole text can be decoded")
    coded = code_first(adaptation, _documents(case, range(num)), shard.num_documents)
    scored = sum(entry.bits for entry in score.entries[:num])
    return _coded(list(range(num)), coded, scored, ADAPTED_TOLERANCE * scored + END_BITS)


def _documents(case: Case, chosen: Sequence[int]) -> list[np.ndarray]:
    return [np.array(case.data.val.doc(index), dtype=np.int64) for index in chosen]


def _coded(chosen: list[int], coded: int, scored: float, allowed: float) -> dict[str, Any]:
    return {
        "chosen": chosen,
        "documents": len(chosen),
        "coded_bits": coded,
        "scored_bits": scored,
        "excess": coded / scored - 1,
        "passed": abs(coded - scored) <= allowed,
    }
