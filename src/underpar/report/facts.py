"""The values of a run that the page shows, and the comparison with xz."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from underpar.build.levers import find_lever, lever_names
from underpar.report.ancestry import Ancestry
from underpar.score.ledger import Score

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Step:
    """One logged step: loss in nats per token, which may not be finite."""

    step: int
    loss: float
    lr_scale: float
    tokens: int
    seconds: float
    # Bits per byte of the held-out text, if it was priced after this step.
    held_out: float | None = None


@dataclass(frozen=True)
class TensorSize:
    """The size of one tensor in the artifact."""

    name: str
    shape: str
    scheme: str
    num_bytes: float
    bits_per_weight: float


@dataclass(frozen=True)
class Sizes:
    """Bytes of the artifact by class and by tensor, the largest first."""

    total_bytes: int
    cap_bytes: int
    model_file_bytes: int
    num_weights: int
    classes: tuple[tuple[str, float], ...]
    tensors: tuple[TensorSize, ...]

    @property
    def parts(self) -> list[tuple[str, float]]:
        """The classes in words, and every lever by its name."""
        return parts_of(dict(self.classes), [(t.name, t.num_bytes) for t in self.tensors])


# The classes of a budget, in words.
CLASSES = {
    "attn": "attention",
    "code": "code that decodes and scores",
    "framing": "lengths and checksum",
    "header": "recipe and table of tensors",
    "mlp": "MLP",
    "scales": "scales of branches",
}


def lever_title(name: str) -> str:
    """What a lever is, by the first words of its file, and its name."""
    if name not in lever_names():
        return f"lever {name}"
    first = (find_lever(name).__doc__ or "").partition("\n")[0]
    # Most begin with the technique's name; the others with what they do, up to a comma.
    what = first.partition(":" if ":" in first else ",")[0]
    return f"{what.rstrip('.')} ({name})"


def parts_of(
    classes: Mapping[str, float], tensors: Iterable[tuple[str, float]]
) -> list[tuple[str, float]]:
    """The classes of a budget in words, the largest first; each lever stands for itself.

    `tensors` are names and bytes.
    """
    parts = {CLASSES.get(name, name): size for name, size in classes.items() if name != "levers"}
    for name, size in tensors:
        if name.startswith("levers."):
            lever = lever_title(name.split(".")[1])
            parts[lever] = parts.get(lever, 0.0) + size
    return sorted(parts.items(), key=lambda part: -part[1])


@dataclass(frozen=True)
class Comparison:
    """The model and `xz -9` on the same text; the bytes of both programs are left out."""

    text_bytes: int
    bits: float
    xz_bytes: int
    artifact_bytes: int

    @property
    def xz_bpb(self) -> float:
        """Bits per byte of xz."""
        return 8 * self.xz_bytes / self.text_bytes

    @property
    def bpb(self) -> float:
        """Bits per byte of the model, without the bytes of the artifact."""
        return self.bits / self.text_bytes

    @property
    def packed_bpb(self) -> float:
        """Bits per byte of the model, with the bytes of the artifact added."""
        return (self.bits + 8 * self.artifact_bytes) / self.text_bytes

    @property
    def break_even_bytes(self) -> int | None:
        """Bytes of text from which artifact plus compressed text are smaller than xz's file."""
        return break_even(self.text_bytes, self.bits, self.xz_bytes, self.artifact_bytes)


def break_even(text_bytes: int, bits: float, other_bytes: int, artifact_bytes: int) -> int | None:
    """Bytes of text from which artifact plus compressed text are smaller than another's file.

    `bits` and `other_bytes` are of the same `text_bytes`. Both rates are taken as constant. None if
    the model does not compress better than the other.
    """
    saved_bits = 8 * other_bytes - bits
    # The comparison is also false for NaN.
    if not 0 < saved_bits < math.inf:
        return None
    return math.floor(8 * artifact_bytes * text_bytes / Fraction(saved_bits)) + 1


@dataclass(frozen=True)
class ScoreResult:
    """The score of one method. Totals are sums of the ledger, not the totals in the file."""

    score: Score
    comparison: Comparison
    artifact_sha256: str
    data_identity: str
    device: str


@dataclass(frozen=True)
class FindingRow:
    """One rule of the audit."""

    rule: str
    verdict: str
    summary: str
    evidence: Pairs
    seconds: float


@dataclass(frozen=True)
class AuditResult:
    """All findings on one artifact.

    The verdict is "of other files" if a judged file changed since, and "by other rules" if a rule
    is missing or a limit was wider than those of the contest.
    """

    verdict: str
    artifact_sha256: str
    data_sha256: str
    profile: str
    # Names of files that changed, appeared or were removed since the audit.
    changed: tuple[str, ...]
    findings: tuple[FindingRow, ...]
    missing: tuple[str, ...] = ()
    wider: tuple[str, ...] = ()
    # The random documents on which scores were repeated; 0 stands for all.
    num_documents: int = 0
    # The verdict on the files that were judged, whether they are here or not.
    verdict_then: str = ""

    def num_findings(self, verdict: str) -> int:
        """Findings with this verdict."""
        return sum(f.verdict == verdict for f in self.findings)


@dataclass(frozen=True)
class RunReport:
    """All values of one run; None or empty if the stage has not run."""

    name: str
    path: str
    recipe_hash: str | None
    about: Pairs
    recipe: tuple[tuple[str, Pairs], ...]
    ancestry: Ancestry | None
    # Why training ended before its time; empty if it did not, or if nothing says so.
    failure: str
    is_trained: bool
    # Bits per byte of the held-out text after training, before quantization.
    final_bpb: float | None
    # Of the training text, or of the held-out text if the run is of an older version.
    bytes_per_token: float | None
    steps: tuple[Step, ...]
    sizes: Sizes | None
    scores: dict[str, ScoreResult]
    audit: AuditResult | None
    artifact_sha256: str | None

    @property
    def title(self) -> str:
        """The recipe in words, or the name of the folder."""
        return self.ancestry.title if self.ancestry else self.name

    @property
    def levers(self) -> list[str]:
        """What the levers of the recipe are."""
        names = [section for section, _ in self.recipe if section.startswith("levers.")]
        return [lever_title(name.split(".")[1]) for name in names]

    def facts(self) -> Pairs:
        """The content of run.json, then the artifacts, data and devices that the results name."""
        rows = [("folder", self.path), *self.about]
        if self.artifact_sha256:
            rows.append(("artifact sha256", self.artifact_sha256))
        for method, result in self.scores.items():
            rows.append((f"score {method}, artifact sha256", result.artifact_sha256))
            rows.append((f"score {method}, data identity", result.data_identity))
            rows.append((f"score {method}, device", result.device))
        if self.audit:
            rows.append(("audit, artifact sha256", self.audit.artifact_sha256))
            rows.append(("audit, data sha256", self.audit.data_sha256))
            rows.append(("audit, profile", self.audit.profile))
        return tuple(rows)

    def stale_files(self) -> list[str]:
        """Names of result files that belong to another artifact than the folder's."""
        claims = {f"score-{m}.json": s.artifact_sha256 for m, s in self.scores.items()}
        if self.audit:
            claims["audit.json"] = self.audit.artifact_sha256
        # Without an artifact in the folder, the results must at least agree with each other.
        expected = self.artifact_sha256 or next(iter(claims.values()), None)
        return [name for name, identity in claims.items() if identity != expected]
