"""Reads the training logs of a submission to Parameter Golf into plain values.

Three formats are known: that of the first baseline (`step:13780/20000 val_loss:2.0606
val_bpb:1.2172 train_time:600038ms`), that of late records, which begin with a list of settings and
the source of the script, and that of this package's own submissions. All are lines of
`name:value`; what a log does not say stays None. A log is text that its author may have edited: the
rules compare it with itself, with the other logs and with constants of the data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from underpar.errors import RunError

# A log is smaller, and its lines are shorter; longer ones are cut.
LARGEST_BYTES = 64_000_000
LONGEST_LINE = 4_000

# Longer numbers are no measurement.
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(?![0-9])"
_COUNT = r"([0-9][0-9,]{0,17})(?![0-9])"
_VALIDATION = re.compile(rf"^(.*?)\bval_loss[:=]\s*{_NUMBER}\s+val_bpb[:=]\s*{_NUMBER}(.*)$")
_STEP = re.compile(rf"^(?:step:)?([0-9]+)/[0-9]+\s+train_loss:\s*{_NUMBER}")
_STEP_LABEL = re.compile(r"^(?:step:)?[0-9]+/[0-9]+")
_TRAIN_TIME = re.compile(rf"\btrain_time:\s*{_NUMBER}ms\b")
_STOP = re.compile(r"^(?:stopping_early|end of training)\b.*\bstep:\s*([0-9]{1,15})")
_SECONDS = re.compile(rf"\b(?:eval_time|elapsed|t)[:=]\s*{_NUMBER}(ms|s)\b")
_TOTAL_EVAL = re.compile(rf"^total_eval_time:\s*{_NUMBER}s")
_HESSIANS = re.compile(rf"\bHessians in {_NUMBER}s")
_LOAD = re.compile(rf"^Deserialize:.*\bdone in {_NUMBER}s")
_WARM_UP = re.compile(rf"\bcompile warmup done \({_NUMBER}s\)")
_HINTS = re.compile(rf"^ngram_tilt:.*\b(?:elapsed|seconds|time)[:=]\s*{_NUMBER}s")
_TARGETS = re.compile(rf"\btarget_tokens:\s*{_COUNT}")
_TOKENS = re.compile(rf"^val_tokens:\s*{_COUNT}|^val_loader:.*\btokens:{_COUNT}")
_DOCUMENTS = re.compile(rf"\b(?:total_docs|val_docs|num_docs):\s*{_COUNT}")
_SHARDS = re.compile(rf"\btrain_shards:\s*{_COUNT}")
_MODEL = re.compile(rf"^Serialized model(\s\S+)?:\s*{_COUNT}")
_CODE = re.compile(rf"^Code size(?:\s\((\w+)\))?:\s*{_COUNT}")
_TOTAL = re.compile(rf"^Total submission size(\s\S+)?:\s*{_COUNT}")
_ALL_SIZES = re.compile(rf"^model_bytes:{_COUNT} code_bytes:{_COUNT} total_bytes:{_COUNT}")
_SETTING = re.compile(r"^  (\w+): ?(.*)$")
_WORD = re.compile(r"^(\w+):(\S+)$")
_NAMED_SEED = re.compile(r"seed[_-]?([0-9]{1,18})", re.IGNORECASE)


@dataclass(frozen=True)
class Validation:
    """One pass over the validation text. Numbers stay text: their digits bound what was divided."""

    label: str
    loss: str
    bpb: str
    seconds: float | None
    in_training: bool

    @property
    def method(self) -> str:
        """The label without its numbers: passes of one method share it."""
        return re.sub(r"[0-9]+", "#", self.label).removesuffix("_exact")


@dataclass(frozen=True)
class Log:
    """What one log says; None where it says nothing."""

    name: str
    seed: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    source_sha256: str | None = None
    validations: tuple[Validation, ...] = ()
    # A digest of all training losses, so that two logs of one run are noticed.
    losses_sha256: str | None = None
    num_steps: int | None = None
    train_seconds: float | None = None
    hessian_seconds: float | None = None
    total_eval_seconds: float | None = None
    # Seconds of work for scoring that the scoring clock may leave out.
    load_seconds: float | None = None
    warm_up_seconds: float | None = None
    hint_seconds: float | None = None
    num_targets: int | None = None
    num_documents: int | None = None
    num_train_shards: int | None = None
    model_bytes: int | None = None
    code_bytes: int | None = None
    compressed_code_bytes: int | None = None
    total_bytes: int | None = None

    @property
    def passes(self) -> tuple[Validation, ...]:
        """Validations after training, in order."""
        return tuple(v for v in self.validations if not v.in_training)

    @property
    def score(self) -> Validation | None:
        """The last validation after training: the score of this run."""
        return self.passes[-1] if self.passes else None

    @property
    def eval_seconds(self) -> float | None:
        """Seconds of the scoring pass by its own clock."""
        if self.total_eval_seconds is not None:
            return self.total_eval_seconds
        score = self.score
        if score is None:
            return None
        clocked = [v.seconds for v in self.passes if v.method == score.method and v.seconds]
        return clocked[-1] if clocked else None

    @property
    def says_something(self) -> bool:
        """Whether this is a log of training or scoring at all."""
        return bool(self.validations or self.num_steps or self.train_seconds or self.total_bytes)


def read_log(path: Path) -> Log:
    """What a file says."""
    if path.stat().st_size > LARGEST_BYTES:
        raise RunError(f"{path} has more than {LARGEST_BYTES:,} bytes; a log is shorter")
    return parse_log(path.name, path.read_bytes().decode("utf-8", "replace"))


def parse_log(name: str, text: str) -> Log:
    """What a text says. Values of the last run count if it holds several."""
    lines = text.splitlines()
    # The script prints its own source before this line. Formats in the source are no values.
    begin = max((i for i, line in enumerate(lines) if _is_header_end(line)), default=0)
    source, lines = lines[:begin], [line[:LONGEST_LINE] for line in lines]
    header, body = lines[:begin], lines[begin:]
    settings = _settings(header if begin else body)
    named = _NAMED_SEED.search(name)
    seed = settings.get("seed", named[1] if named else "")
    steps = [m.groups() for m in map(_STEP.match, body) if m]
    stops = [int(m[1]) for m in map(_STOP.match, body) if m]
    losses = hashlib.sha256("\n".join(map(str, steps)).encode()).hexdigest() if steps else None
    trained = [float(m[1]) for m in map(_TRAIN_TIME.search, body) if m]
    codes = {m[1] or "": _count(m[2]) for m in map(_CODE.match, body) if m}
    sizes = [tuple(map(_count, m.groups())) for m in map(_ALL_SIZES.match, body) if m]
    model, code, total = sizes[-1] if sizes else (None, None, None)
    return Log(
        name,
        seed=int(seed) if re.fullmatch("[0-9]{1,18}", seed) else None,
        settings=settings,
        source_sha256=_source_sha256(source),
        validations=tuple(_validations(body)),
        losses_sha256=losses,
        num_steps=stops[-1] if stops else (int(steps[-1][0]) if steps else None),
        train_seconds=max(trained) / 1000 if trained else None,
        hessian_seconds=_last(_HESSIANS, body),
        total_eval_seconds=_last(_TOTAL_EVAL, body),
        load_seconds=_last(_LOAD, body),
        warm_up_seconds=_last(_WARM_UP, body),
        hint_seconds=_last(_HINTS, body),
        num_targets=_last_count(_TARGETS, body) or _last_count(_TOKENS, body),
        num_documents=_last_count(_DOCUMENTS, body),
        num_train_shards=_last_count(_SHARDS, body),
        model_bytes=_packed(_MODEL, body) or model,
        code_bytes=codes.get("uncompressed", codes.get("", code)),
        compressed_code_bytes=codes.get("compressed"),
        total_bytes=_packed(_TOTAL, body) or total,
    )


def join_logs(logs: Iterable[Log]) -> list[Log]:
    """One log per run: a log of scoring alone is joined to the log that trained its seed."""
    trained: list[Log] = []
    rest: list[Log] = []
    for log in sorted(logs, key=lambda log: log.name):
        (trained if log.train_seconds is not None else rest).append(log)
    for scored in rest:
        same = [i for i, log in enumerate(trained) if log.seed == scored.seed]
        if len(same) != 1:
            trained.append(scored)
            continue
        log = trained[same[0]]
        known = {f.name: getattr(scored, f.name) for f in fields(Log)}
        news = {name: value for name, value in known.items() if value not in (None, (), {})}
        news["name"] = f"{log.name} + {scored.name}"
        news["settings"] = {**log.settings, **scored.settings}
        news["validations"] = log.validations + scored.validations
        trained[same[0]] = replace(log, **news)
    return trained


def _is_header_end(line: str) -> bool:
    return re.match(r"Running Python [0-9]", line) is not None


def _settings(lines: list[str]) -> dict[str, str]:
    """The block after "Hyperparameters:", or words of `name:value` before the first step."""
    if "Hyperparameters:" in lines:
        block: dict[str, str] = {}
        for line in lines[lines.index("Hyperparameters:") + 1 :]:
            match = _SETTING.match(line)
            if not match:
                break
            block[match[1]] = match[2].strip()
        return block
    words: dict[str, str] = {}
    for line in lines:
        if _STEP_LABEL.match(line):
            break
        pairs = [_WORD.match(word) for word in line.split()]
        if pairs and all(pairs) and not line.startswith(("warmup_step:", "val_", "train_loader:")):
            words |= {pair[1]: pair[2] for pair in pairs if pair}
    return words


def _source_sha256(lines: list[str]) -> str | None:
    """The digest of the script that a log begins with."""
    if "Source code:" not in lines:
        return None
    begin = lines.index("Source code:") + 1
    rules = [i for i in range(begin, len(lines)) if re.fullmatch("={20,}", lines[i])]
    if len(rules) < 2:
        return None
    return source_sha256("\n".join(lines[rules[0] + 1 : rules[-1]]))


def source_sha256(text: str) -> str:
    """The digest of a script, whatever its line ends and the blank lines at its end."""
    return hashlib.sha256("\n".join(text.splitlines()).rstrip().encode()).hexdigest()


def _validations(body: list[str]) -> Iterable[Validation]:
    for line in body:
        match = _VALIDATION.match(line)
        if match:
            label, loss, bpb, rest = match.groups()
            clock = _SECONDS.search(rest)
            seconds = None
            if clock:
                seconds = float(clock[1]) / (1000 if clock[2] == "ms" else 1)
            in_training = _STEP_LABEL.match(label) is not None
            yield Validation(label.strip().rstrip(":")[:80], loss, bpb, seconds, in_training)


def _last(pattern: re.Pattern[str], lines: list[str]) -> float | None:
    values = [float(m[1]) for m in map(pattern.search, lines) if m]
    return values[-1] if values else None


def _last_count(pattern: re.Pattern[str], lines: list[str]) -> int | None:
    values = [next(g for g in m.groups() if g) for m in map(pattern.search, lines) if m]
    return _count(values[-1]) if values else None


def _packed(pattern: re.Pattern[str], lines: list[str]) -> int | None:
    """The last count of a packed form; the count before packing has no name beside it."""
    values = [(bool(m[1]), _count(m[2])) for m in map(pattern.match, lines) if m]
    packed = [count for is_packed, count in values if is_packed] or [c for _, c in values]
    return packed[-1] if packed else None


def _count(text: str) -> int:
    return int(text.replace(",", ""))
