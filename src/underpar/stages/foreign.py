"""Judge a submission to Parameter Golf by its files; nothing is written, and none of it is run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpar.audit.case import DEFAULT_LIMITS, Limits
from underpar.audit.finding import STRICT, Finding, overall
from underpar.audit.foreign import is_submission, judge_submission, open_submission
from underpar.data.folder import hash_file
from underpar.errors import RuleError


@dataclass(frozen=True)
class AuditedSubmission:
    """The verdict on a submission, the findings that it is made of, and the files it is of."""

    path: Path
    verdict: str
    profile: str
    findings: list[Finding]
    # The SHA-256 of every file, by its path in the folder.
    files: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "submission": str(self.path),
            "verdict": self.verdict,
            "profile": self.profile,
            "files": self.files,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def audit_submission(
    path: Path,
    limits: Limits = DEFAULT_LIMITS,
    profile: str = STRICT,
    against: Sequence[str] = (),
) -> AuditedSubmission:
    """Judge a submission rule by rule, against the record to beat if it is named."""
    case = open_submission(path, limits, read_scores(against))
    findings = judge_submission(case)
    files = {name: hash_file(path / name) for name in case.files}
    return AuditedSubmission(path, overall(findings, profile), profile, findings, files)


def read_scores(words: Sequence[str]) -> list[float]:
    """Bits per byte, given as numbers or as submission folders with a score per log."""
    scores: list[float] = []
    for word in words:
        try:
            value = float(word)
        except ValueError:
            if not is_submission(Path(word)):
                raise RuleError(
                    f"--against {word!r:.120}: expected bits per byte or a submission folder"
                ) from None
            scores += open_submission(Path(word)).scores
            continue
        if not (math.isfinite(value) and value > 0):
            raise RuleError(f"--against {word}: expected a finite number above 0")
        scores.append(value)
    return scores
