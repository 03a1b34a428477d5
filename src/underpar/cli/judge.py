"""Commands that judge a model: score, audit, compare, report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Never

import typer

from underpar.cli import results
from underpar.cli.console import ERR, OUT, open_progress, show_json, show_table
from underpar.cli.options import (
    ArtifactPath,
    Attention,
    Compiled,
    Device,
    Json,
    app,
    audit_exit_code,
    choose_attention,
    takes_words,
)

if TYPE_CHECKING:
    from underpar.stages.audit import Audited
    from underpar.stages.foreign import AuditedSubmission


@app.command()
def score(
    artifact: ArtifactPath,
    data: Annotated[
        Path | None, typer.Option("--data", help="Default: the folder it was trained on.")
    ] = None,
    adapt: Annotated[
        bool, typer.Option(help="Score as the recipe says: its scoring levers, windows and order.")
    ] = False,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help="Use a lever of scoring, may be repeated: lora_ttt, tilt..."),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Score in exact mode, and say what it costs in bits."),
    ] = False,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Sliding windows: new targets per window. Below the context, windows overlap."
        ),
    ] = None,
    flat: Annotated[
        bool | None, typer.Option(help="Let windows cross the ends of documents; needs --stride.")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="stream: decodable (default). published: sorted by length, as in the records."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="After this many seconds, score without learning; 0: never.")
    ] = 0.0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a setting of a lever of --with: levers.lora_ttt.rank=40"
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of continuing a stopped score.")
    ] = False,
    device: Device = "auto",
    attention: Attention = "auto",
    compiled: Compiled = None,
    json: Json = False,
) -> None:
    """Bits per byte of an artifact on held-out text; the ledger lies beside the artifact.

    \b
    underpar score runs/mine
    underpar score runs/mine --adapt
    underpar score runs/mine --exact
    underpar score runs/mine/model.upar --data data --stride 512
    underpar score runs/mine/model.upar --data data --with lora_ttt --with tilt
    underpar score runs/mine/model.upar --data data --with lora_ttt --order published

    Every target is priced before anything learns from it. 'underpar levers' lists the levers of
    stage infer; their settings are the recipe's, or else the lever's defaults. A score that was
    stopped or killed continues with the same command, to the same bits.
    """
    from underpar.core.run_folder import artifact_at, run_at
    from underpar.core.runtime import open_runtime
    from underpar.errors import RuleError
    from underpar.score.partial import Stopped
    from underpar.stages.exact_score import score_exactly
    from underpar.stages.score import choose_method, score_artifact
    from underpar.stages.train import data_of

    if exact and (adapt or with_ or stride or flat or order or seconds or set_):
        raise RuleError("exact mode covers plain scores: leave out --exact or the other options")
    method, changes = choose_method(adapt, with_ or (), stride, flat, order, seconds)
    changes += set_ or ()
    runtime = open_runtime(device, compiled)
    choose_attention(attention, runtime)
    artifact = artifact_at(artifact)
    data = data or data_of(run_at(artifact))
    progress = open_progress(json, runtime)
    if exact:
        summary = score_exactly(artifact, data, runtime, progress)
        results.show(json, summary, results.scored(summary, artifact.parent))
        return
    try:
        scored = score_artifact(artifact, data, runtime, method, changes, progress, fresh)
        summary = scored.summary()
    except Stopped as stopped:
        if runtime.is_main:
            ERR.print(str(stopped), markup=False, soft_wrap=True)
        summary = {"finished": False, "method": stopped.method, "step": stopped.step}
    if runtime.is_main:
        results.show(json, summary, results.scored(summary, artifact.parent))


@app.command(cls=takes_words("--against"))
def audit(
    run: Annotated[
        Path,
        typer.Argument(help="A folder made by 'underpar train', or a foreign submission."),
    ],
    data: Annotated[Path | None, typer.Option(help="Default: the data it was trained on.")] = None,
    expect_data: Annotated[
        str, typer.Option(metavar="SHA256", help="The SHA-256 that the data must have.")
    ] = "",
    cap: Annotated[
        int, typer.Option(metavar="BYTES", help="The most bytes of artifact, script, tokenizer.")
    ] = 16_000_000,
    train_seconds: Annotated[
        float, typer.Option(help="The most seconds with training text.")
    ] = 600.0,
    score_seconds: Annotated[float, typer.Option(help="The most seconds of a score.")] = 600.0,
    documents: Annotated[
        int,
        typer.Option(help="Repeat the plain score on so many random documents; 0: on all."),
    ] = 0,
    code_tokens: Annotated[
        int, typer.Option(help="Code random documents up to this many tokens; 0: all documents.")
    ] = 0,
    retrain: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Take N training steps again, dealt out over all checkpoints. Default: all of "
            "them if this machine repeats them bit for bit, else 10.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random choices, to repeat an audit.")
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="strict: a decoder can follow. precedent: also tolerate what accepted records do."
        ),
    ] = "strict",
    strict: Annotated[
        bool, typer.Option("--strict", help="What is not shown counts as a fail.")
    ] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Of a submission: the record to beat, a folder or its scores."),
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Check a run's size, data, clocks, scores and codec, rule by rule.

    \b
    underpar audit runs/mine
    underpar audit runs/mine --expect-data 3f0c...    the data are those that were published
    underpar audit runs/mine --documents 50 --code-tokens 20000 --retrain 10     faster: a sample

    Exit code 0: every rule passes. 1: a rule fails. 3: no rule fails, but the evidence for one is
    missing. The audit believes no figure of the run folder: it trains, packs, scores, counts and
    decodes again. Training steps repeat on the kind of device that made them.
    Limits are yours; limits that a recipe names for itself can only be tighter. Verdicts, evidence
    and the SHA-256 of every file judged are written to RUN/audit.json. Score the artifact first.

    \b
    underpar audit records/2026-04-30_mine                           a foreign submission
    underpar audit records/2026-04-30_mine --against 1.0574 1.0573 1.0581

    A folder with train_gpt.py or submission.json is a submission to Parameter Golf. Its files
    alone are judged: sizes, times, seeds, the arithmetic of its logs, and hints from its code. What
    files cannot show is "not shown", with what would show it. Nothing is written or run.
    """
    from underpar.audit.case import Limits
    from underpar.audit.finding import PROFILES
    from underpar.audit.foreign import is_submission
    from underpar.core.run_folder import run_at
    from underpar.core.runtime import open_runtime
    from underpar.errors import RuleError
    from underpar.stages.audit import AuditRequest, audit_run
    from underpar.stages.foreign import audit_submission

    if profile not in PROFILES:
        raise RuleError(f"--profile {profile}: expected {' or '.join(PROFILES)}")
    limits = Limits(cap, train_seconds, score_seconds, expect_data)
    if is_submission(run):
        if data or expect_data:
            raise RuleError(f"{run} is a submission: no data are read; leave --data out")
        _show_audit(run, audit_submission(run, limits, profile, against or ()), strict, json)
    if against:
        raise RuleError(f"{run} is no submission; compare runs with 'underpar compare'")
    request = AuditRequest(data, limits, profile, documents, code_tokens, retrain, seed)
    runtime = open_runtime(device)
    _show_audit(run, audit_run(run_at(run), runtime, request, open_progress(json)), strict, json)


def _show_audit(run: Path, audited: Audited | AuditedSubmission, strict: bool, json: bool) -> Never:
    """Print the findings and leave with the verdict's exit code."""
    if json:
        show_json(audited.as_dict())
    else:
        rows = [(f.rule, f.verdict, f.summary) for f in audited.findings]
        results.audited(rows, f"Audit of {run}", audited.verdict).show()
        show_table("", ("rule", "verdict", "evidence"), rows)
    raise typer.Exit(audit_exit_code(audited.verdict, strict))


@app.command(cls=takes_words("--with"))
def compare(
    old: Annotated[list[str], typer.Argument(help="Runs, score files or numbers: the old side.")],
    new: Annotated[
        list[str], typer.Option("--with", help="The new side: all words up to the next option.")
    ],
    method: Annotated[str, typer.Option(help="Which score of a run to read, by name.")] = "plain",
    margin_nats: Annotated[
        float | None, typer.Option(help="Also test a gain of at least this, in nats per token.")
    ] = None,
    margin_bpb: Annotated[
        float | None, typer.Option(help="Also test a gain of at least this, in bits per byte.")
    ] = None,
    bytes_per_token: Annotated[
        float | None,
        typer.Option(help="Of the new side; converts nats per token. Runs know their own."),
    ] = None,
    json: Json = False,
) -> None:
    """Is the new side better? Tests, the field's two rules, and the seeds still needed.

    \b
    underpar compare runs/a-1 runs/a-2 --with runs/b-1 runs/b-2
    underpar compare runs/a-1 runs/a-2 --with runs/b-1 runs/b-2 --method adapt
    underpar compare 1.0574 1.0573 1.0581 --with 1.0561 1.0566 1.0568 --bytes-per-token 3.15716

    Each side needs two results or more. Welch's test asks whether the gain exceeds a margin; the
    paired test runs if both sides have the same seeds. A record must gain 0.005 nats at p < 0.01
    (README of the contest; the unit is nats per token, some read it per byte). The leaderboard
    updates of PR 1902 and 2146 asked for p < 0.25 without a margin. A nat per token is
    1 / (ln 2 x bytes per token) bits per byte, with the tokens of the new side.
    """
    from underpar.lab.compare import compare as compare_results
    from underpar.lab.compare import read_result

    sides = [[read_result(text, method) for text in side] for side in (old, new)]
    result = compare_results(sides[0], sides[1], bytes_per_token, margin_nats, margin_bpb)
    if json:
        show_json(result)
        return
    results.Result(results.compared(result)).show()
    rows = []
    for test in result["tests"]:
        interval = "{low:.4f} to {high:.4f}".format(**test["interval"])
        nats = test["margin_nats_per_token"]
        rows.append(
            (
                test["test"],
                f"{test['num_old']} / {test['num_new']}",
                f"{test['margin']:.6f}",
                "?" if nats is None else f"{nats:.5f}",
                f"{test['gain']:.6f}",
                interval,
                test["p"],
            )
        )
    columns = ("test", "runs#", "margin#", "nats/token#", "gain#", "95 % interval#", "p#")
    show_table("lower bits per byte is better; p is one-sided", columns, rows)
    verdicts = {True: "met", False: "not met", None: "not shown"}
    judged = []
    for rule in result["acceptance"]:
        seeds = "no number" if rule["is_met"] is not None else "?"
        if rule["num_seeds"] is not None:
            seeds = f"{rule['num_seeds']} ({rule['num_missing']} to run)"
        judged.append((rule["rule"], verdicts[rule["is_met"]], rule["why"], seeds))
    show_table(
        "is it a record? seeds: to show this gain with power 0.8",
        ("rule", "verdict", "because", "seeds per side#"),
        judged,
    )
    if result["bytes_per_token"]:
        OUT.print(
            f"gain: {result['gain_bpb']:.6f} bits per byte = {result['gain_nats_per_token']:.6f} "
            f"nats per token at {result['bytes_per_token']:.6f} bytes per token",
            soft_wrap=True,
        )
    for note in result["notes"]:
        OUT.print(f"note: {note}", markup=False, soft_wrap=True)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders; several are compared on one page."),
    ],
    out: Annotated[Path | None, typer.Option(help="Default: report.html in the first run.")] = None,
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Without the excerpt, for which the model has to run.")
    ] = False,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page about one run or several.

    \b
    underpar report runs/mine
    underpar report runs/mine runs/other --out both.html

    The page shows what the stages have left so far: curves, bytes, scores, audit, recipe. If the
    data folder is here, the model prices an excerpt of held-out text and writes a few lines. A
    Markdown file beside the page says the same in short, for pasting.
    """
    from underpar.core.run_folder import run_at
    from underpar.report.build import build_report

    folders = [run_at(run) for run in runs]
    path = build_report(folders, out or folders[0].report_file, with_text=not no_text)
    beside = path.with_suffix(".md")
    show_json({"report": str(path)}) if json else typer.echo(f"report: {path} (in short: {beside})")
