"""Results: run folders of any recipes -> one table in Markdown, a row per run and way of scoring.

The columns are those of PR 2014's table. A folder may be a copy without weights, or of a run whose
later stages are missing: a dash stands for what no file says, and a line below names the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

from underpar.audit.finding import PASS, STRICT
from underpar.core.fields import Fields
from underpar.core.run_folder import RunFolder, write_atomic
from underpar.errors import RunError
from underpar.lab.seeds import MISSING, refuse_others, table
from underpar.recipe import Recipe
from underpar.report.facts import AuditResult, RunReport, ScoreResult
from underpar.report.gather import OTHER_FILES, gather
from underpar.score.method import PUBLISHED, STREAM

# The lines around the table: what is between them is replaced, the rest of a page stays.
PUBLIC_RUNS = Path(__file__).with_name("public_runs.toml")
# The word for an order of scoring.
ORDERS = {STREAM: "decodable", PUBLISHED: "published order"}
BEFORE, QUANTIZED, ADAPTED = "BPB before quantization", "BPB quantized", "BPB adapted"
BYTES = "artifact bytes"
# Name of a column of numbers -> their format.
COLUMNS = {
    "steps": ",.0f",
    "ms per step": ",.1f",
    "training ms": ",.0f",
    BEFORE: ".5f",
    QUANTIZED: ".5f",
    ADAPTED: ".5f",
    "adapting s": ",.1f",
    BYTES: ",.0f",
}
HEAD = ["recipe", "seed", *COLUMNS, "scored as", "order", "audit"]
# Statistics over seeds: name, function, the fewest runs it has a meaning for.
STATISTICS = (
    ("mean", fmean, 2),
    ("deviation, sample", stdev, 2),
    ("deviation, population", pstdev, 2),
)


LEGEND = (
    "- BPB before quantization is of the weights that are packed, in the precision of training; "
    "quantized, of the artifact, each document alone, decodable; adapted, by the column `scored "
    "as`.",
    "- Decodable: a decoder can follow the order. Published order: documents by length, as in the "
    "records, which a decoder could not know.",
    "- Training ms are of the training clock, which stands still for compiling and validation. "
    "Adapting s are of the whole scoring, loading and warm-up too. Artifact bytes are with code.",
)


@dataclass(frozen=True)
class Row:
    """One run, scored in one way. `figures` maps columns to numbers and lacks the missing ones."""

    name: str
    figures: dict[str, float]
    seed: str = MISSING
    scored_as: str = MISSING
    order: str = MISSING
    verdict: str = MISSING

    def cells(self) -> list[str]:
        """The row as texts, in the order of `HEAD`."""
        numbers = [
            f"{self.figures[name]:{form}}" if name in self.figures else MISSING
            for name, form in COLUMNS.items()
        ]
        return [self.name, self.seed, *numbers, self.scored_as, self.order, self.verdict]


@dataclass(frozen=True)
class PublicRun:
    """A run of a public script, from a TOML file."""

    name: str
    text_bytes: int
    note: str
    seed: int | str = MISSING
    steps: int | None = None
    training_seconds: float | None = None
    before: float | None = None
    quantized: float | None = None
    adapted: float | None = None
    adapting_seconds: float | None = None
    order: str = ""
    bytes: int | None = None

    def row(self) -> Row:
        """Its row; a column has only the order in which it adapted."""
        known = {
            BEFORE: self.before,
            QUANTIZED: self.quantized,
            ADAPTED: self.adapted,
            "adapting s": self.adapting_seconds,
            BYTES: self.bytes,
            **_training(self.steps, self.training_seconds),
        }
        figures = {name: float(value) for name, value in known.items() if value is not None}
        return Row(self.name, figures, str(self.seed), order=ORDERS.get(self.order, MISSING))


@dataclass(frozen=True)
class Run:
    """What the files of one run folder say. `recipe` has seed 0, so that seeds compare equal."""

    name: str
    seed: int
    recipe: Recipe
    report: RunReport
    rows: tuple[Row, ...]
    text_bytes: frozenset[int]
    device: str
    data_identity: str
    missing: tuple[str, ...] = field(default=())


def write_results(out: Path, runs: Sequence[str], public: Path = PUBLIC_RUNS) -> None:
    """Write the page about runs, each "FOLDER" or "NAME=FOLDER"; NAME is that of the recipe."""
    if not runs:
        raise RunError("no run to write about; give at least one run folder")
    read = [read_run(text) for text in runs]
    paths = [run.report.path for run in read]
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise RunError("a run is given twice, which would shrink the deviation; once each")
    texts = sorted(frozenset[int]().union(*(run.text_bytes for run in read)))
    if len(texts) > 1:
        sizes = " and ".join(f"{size:,}" for size in texts)
        raise RunError(
            f"runs priced {sizes} bytes of text, so their BPB do not compare; one page each"
        )
    beside = [run for run in read_public(public) if run.text_bytes in texts]
    write_atomic(out, into_page(out, to_markdown(read, beside)))


def into_page(out: Path, text: str, command: str = "underpar lab results") -> str:
    """The page `out` with `text` between the lines that name a command; of a new page, its part."""
    begin, end = (f"<!-- {word}: {command} -->" for word in ("begin", "end"))
    section = f"{begin}\n\n{text}\n{end}\n"
    if not out.exists():
        return section
    try:
        before, _, rest = out.read_text().partition(f"{begin}\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{out} is no Markdown file ({error!s:.200}); give another name") from error
    _, mark, after = rest.partition(f"{end}\n")
    if not mark:
        raise RunError(f"{out} exists without the lines {begin} and {end}; give another name")
    return before + section + after


def read_run(text: str) -> Run:
    """The run in a folder, given as "FOLDER" or "NAME=FOLDER"."""
    name, _, path = ("", "", text) if Path(text).is_dir() else text.partition("=")
    if not path:
        name, path = "", name
    folder = RunFolder(Path(path))
    report, recipe = gather(folder), folder.read_recipe()
    seed = recipe.train.seed
    name = name or report.name
    end = _fields(folder, folder.validation_file)
    about = _fields(folder, folder.about_file)
    identities = {result.data_identity for result in report.scores.values()}
    if about:
        identities.add(about.text("data_identity"))
    identity = about.text("data_identity") if about else next(iter(identities), "")
    refuse_others(folder, report, identity)
    figures = _figures(report, end)
    adapting = {label: s for label, s in report.scores.items() if label != "plain"}
    row = Row(name, figures, str(seed), verdict=verdict_of(folder, report.audit))
    rows = [_scored(row, result) for result in adapting.values()] or [row]
    texts = {result.score.num_bytes for result in report.scores.values()}
    if end:
        texts.add(end.count("num_bytes"))
    return Run(
        name,
        seed,
        replace(recipe, train=replace(recipe.train, seed=0)),
        report,
        tuple(rows),
        frozenset(texts),
        about.text("device") if about else MISSING,
        identity,
        tuple(_missing(folder, report, bool(adapting))),
    )


def _fields(folder: RunFolder, path: Path) -> Fields | None:
    return folder.read_fields(path) if path.exists() else None


def _training(steps: int | None, seconds: float | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    if steps is not None:
        figures["steps"] = steps
    if seconds is not None:
        figures["training ms"] = 1000 * seconds
    if steps and seconds is not None:
        figures["ms per step"] = 1000 * seconds / steps
    return figures


def _figures(report: RunReport, end: Fields | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    if end:
        has_average = end.values.get("average_bpb") is not None
        figures |= _training(end.count("step"), end.number("seconds"))
        # The weights that are packed.
        figures[BEFORE] = end.number("average_bpb" if has_average else "live_bpb")
    if "plain" in report.scores:
        figures[QUANTIZED] = report.scores["plain"].score.bpb
    if report.sizes:
        figures[BYTES] = report.sizes.total_bytes
    return figures


def _scored(row: Row, result: ScoreResult) -> Row:
    score = result.score
    seconds = sum(score.seconds.values())
    figures = row.figures | {ADAPTED: score.bpb, "adapting s": seconds}
    order = ORDERS.get(score.order, score.order)
    return replace(row, figures=figures, scored_as=score.method, order=order)


def verdict_of(folder: RunFolder, audit: AuditResult | None) -> str:
    """The verdict of the audit, even if the folder is a copy that lacks files which it judged.

    A judged file that is here and differs takes the verdict away.
    """
    if audit is None:
        return MISSING
    if any((folder.path / name).exists() for name in audit.changed):
        return OTHER_FILES
    profile = f" ({audit.profile})" if audit.profile != STRICT else ""
    drawn = f", {audit.num_documents:,} documents" if audit.num_documents else ""
    return audit.verdict_then + (profile + drawn if audit.verdict_then == PASS else profile)


def _missing(folder: RunFolder, report: RunReport, has_adapted: bool) -> Iterator[str]:
    """Files that the table has dashes for, and files that an audit judged and that are not here."""
    for path in (folder.about_file, folder.validation_file, folder.budget_file):
        if not path.exists():
            yield path.name
    if "plain" not in report.scores:
        yield folder.score_file("plain").name
    if not has_adapted:
        yield "a score other than the plain one"
    if report.audit is None:
        yield folder.audit_file.name
    else:
        for name in report.audit.changed:
            if not (folder.path / name).exists():
                yield f"{name}, which the audit judged"


def read_public(path: Path) -> list[PublicRun]:
    """The runs in a TOML file of `[[run]]` tables."""
    known = {f.name for f in fields(PublicRun)}
    try:
        entries: list[dict[str, Any]] = tomllib.loads(path.read_text())["run"]
        for entry in entries:
            if unknown := sorted({*entry} - known):
                raise RunError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
        runs = [PublicRun(**entry) for entry in entries]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is no list of public runs ({error!s:.200})") from error
    for run in runs:
        if run.order not in ("", *ORDERS):
            raise RunError(f"{path}: order {run.order!r}, expected {' or '.join(ORDERS)}")
    return runs


def to_markdown(runs: Sequence[Run], beside: Sequence[PublicRun]) -> str:
    """The page: the table, then what it is of, what is missing, and notes on public runs."""
    groups: list[list[Run]] = []
    for run in runs:
        group = next((g for g in groups if g[0].recipe == run.recipe), None)
        groups.append([run]) if group is None else group.append(run)
    rows = [row for group in groups for row in _group_rows(group)]
    rows += [run.row() for run in beside]
    parts = [table(HEAD, [row.cells() for row in rows]), "\n".join(_remarks(groups))]
    if beside:
        parts.append("\n".join(f"- {run.name}: {run.note.strip()}" for run in beside))
    return "\n\n".join(parts) + "\n"


def _group_rows(group: list[Run]) -> Iterator[Row]:
    """The rows of one recipe: its seeds by way of scoring, then statistics over them."""
    rows = [
        replace(row, name=group[0].name)
        for run in sorted(group, key=lambda run: run.seed)
        for row in run.rows
    ]
    for scored_as in dict.fromkeys(row.scored_as for row in rows):
        same = [row for row in rows if row.scored_as == scored_as]
        yield from same
        shared = [name for name in COLUMNS if all(name in row.figures for row in same)]
        for name, statistic, fewest in STATISTICS:
            if len(same) >= fewest:
                figures = {key: statistic([row.figures[key] for row in same]) for key in shared}
                orders = {row.order for row in same}
                order = orders.pop() if len(orders) == 1 else MISSING
                yield Row(group[0].name, figures, name, scored_as, order, "")


def _remarks(groups: Sequence[Sequence[Run]]) -> Iterator[str]:
    for group in groups:
        runs = f"{len(group)} {'run' if len(group) == 1 else 'runs'}"
        devices = "; ".join(sorted({run.device for run in group}))
        data = ", ".join(sorted({f"`{run.data_identity}`" for run in group}))
        context = f"{group[0].recipe.model.context:,}"
        yield f"- {group[0].name}: {runs} on {devices}; data {data}; context {context}."
    yield from LEGEND
    for run in (run for group in groups for run in group):
        if run.missing:
            yield f"- Not in the folder of {run.name}, seed {run.seed}: {'; '.join(run.missing)}."
