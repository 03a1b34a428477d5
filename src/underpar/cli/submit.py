"""Commands for the contest: submit, unbundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from underpar.cli import results
from underpar.cli.console import open_progress, show_json, show_table
from underpar.cli.options import Json, app, audit_exit_code, show_summary

CAP_BYTES = 16_000_000


@app.command()
def submit(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders: seeds of one recipe, audited."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write.")] = None,
    verify: Annotated[
        Path | None, typer.Option(help="Check this submission folder and write nothing.")
    ] = None,
    author: Annotated[str, typer.Option(help="Your name, for submission.json.")] = "",
    github_id: Annotated[str, typer.Option(help="Your GitHub ID, for submission.json.")] = "",
    name: Annotated[str, typer.Option(help="Title; default: the hash of the recipe.")] = "",
    blurb: Annotated[str, typer.Option(help="What is new, in a sentence.")] = "",
    cap: Annotated[int, typer.Option(help="Byte cap of model and train_gpt.py.")] = CAP_BYTES,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a submission folder at --out.")
    ] = False,
    proof: Annotated[
        bool, typer.Option("--proof/--no-proof", help="Train train_gpt.py from an empty folder.")
    ] = True,
    json: Json = False,
) -> None:
    """Write the folder of a contest submission: one-file train_gpt.py, logs, figures, README.

    \b
    underpar pack runs/seed1 --for-submission       then score and audit it; the same per seed
    underpar submit runs/seed1 runs/seed2 runs/seed3 --out my-record --author Me --github-id me
    underpar submit --verify my-record

    train_gpt.py holds the code and the recipe, and trains, packs and scores on its own. Its bytes
    and those of the model count. The folder is then checked, and proved: the script trains at tiny
    size from an empty folder and must reproduce the package's model and score bit for bit.
    Exit code 0: everything is shown. 1: a check fails. 3: evidence is missing, such as three seeds.
    """
    from underpar.audit.finding import not_shown, overall
    from underpar.audit.foreign import is_submission
    from underpar.audit.submission import check_submission
    from underpar.errors import RunError
    from underpar.stages.prove import prove_folder
    from underpar.stages.submit import Author, write_submission

    if verify is not None and (runs or out):
        raise RunError(f"--verify {verify} checks a folder that is there; leave out runs and --out")
    if verify is not None and not is_submission(verify):
        raise RunError(
            f"{verify} holds neither train_gpt.py nor submission.json; give the --out of 'underpar "
            "submit'"
        )
    if verify is None:
        if not runs or out is None:
            raise RunError("submit needs RUN... and --out FOLDER, or --verify FOLDER")
        write_submission(runs, out, Author(author, github_id, name, blurb), cap, overwrite)
    folder = verify or out
    assert folder is not None
    findings = check_submission(folder, cap)
    if proof:
        findings.append(prove_folder(folder, open_progress(json)))
    else:
        findings.append(not_shown("reproduction", "left out with --no-proof"))
    verdict = overall(findings)
    if json:
        trees = [finding.as_dict() for finding in findings]
        show_json({"folder": str(folder), "verdict": verdict, "findings": trees})
    else:
        rows = [(f.rule, f.verdict, f.summary) for f in findings]
        results.audited(rows, str(folder), verdict).show()
        show_table("", ("check", "verdict", "evidence"), rows)
    raise typer.Exit(audit_exit_code(verdict))


@app.command()
def unbundle(
    script: Annotated[Path, typer.Argument(help="A train_gpt.py or score.py of this package.")],
    out: Annotated[Path, typer.Option(help="A folder that does not exist or is empty.")],
    json: Json = False,
) -> None:
    """Write the sources in a one-file script as modules, without running the script.

    \b
    underpar unbundle my-record/train_gpt.py --out sources

    Bundling removed docstrings, comments, most types and layout; every statement is there. Modules
    are compared with those of this package after the same removal, and named if they differ.
    """
    from underpar.submit.unbundle import unbundle as run

    show_summary(json, f"{script} -> {out}", run(script, out))
