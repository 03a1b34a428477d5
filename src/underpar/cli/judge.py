"""Commands that judge: score, audit, compare, ablate, bench, speed, report, doctor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from underpar.cli.options import (
    ArtifactPath,
    Attention,
    Compiled,
    DataPath,
    Device,
    Json,
    RecipeName,
    RunPath,
    Set,
    app,
    choose_attention,
    load_checked,
    show_summary,
)
from underpar.core.console import ERR, OUT, progress_bar, show_json, show_pairs, show_table


@app.command()
def score(
    artifact: ArtifactPath,
    data: DataPath,
    adapt: Annotated[
        bool, typer.Option(help="With the scoring levers that the recipe names.")
    ] = False,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help="A lever of scoring, may be repeated: lora_ttt, tilt..."),
    ] = None,
    stride: Annotated[
        int, typer.Option(help="Targets that a window owns: they overlap below the context.")
    ] = 0,
    flat: Annotated[bool, typer.Option(help="Windows reach over the ends of documents.")] = False,
    order: Annotated[
        str, typer.Option(help="stream: decodable. published: by length, as records have it.")
    ] = "stream",
    seconds: Annotated[
        float, typer.Option(help="After so many, the rest is scored without learning; 0: never.")
    ] = 0.0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a scoring value: levers.lora_ttt.rank=40"),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, whatever a stopped score left.")
    ] = False,
    device: Device = "auto",
    attention: Attention = "auto",
    compiled: Compiled = None,
    json: Json = False,
) -> None:
    """Bits per byte of an artifact on held-out text; the ledger lies beside the artifact.

    \b
    underpar score runs/mine/model.upar --data data
    underpar score runs/mine/model.upar --data data --stride 512
    underpar score runs/mine/model.upar --data data --with lora_ttt --with tilt
    underpar score runs/mine/model.upar --data data --with lora_ttt --order published

    Every target is priced before anything learns from it. 'underpar levers' lists the levers of
    stage infer; settings are the recipe's, or the lever's defaults. A score that was stopped or
    killed continues with the same command, to the same bits; --fresh starts over.
    """
    from underpar.core.runtime import open_runtime
    from underpar.errors import RuleError
    from underpar.score.method import ADAPT, Method
    from underpar.score.partial import Stopped
    from underpar.stages import score as stage

    method = Method(tuple(with_ or ()), stride, flat, order, seconds)
    if adapt:
        if method != Method(seconds=seconds):
            raise RuleError("--adapt is a method of its own; leave out --with, --stride, --order")
        method = replace(ADAPT, seconds=seconds)
    runtime = open_runtime(device, compiled)
    choose_attention(attention, runtime)
    if fresh:
        stage.forget_partial(artifact, method)
    try:
        summary = stage.score(artifact, data, runtime, method, set_ or (), quiet=json)
    except Stopped as stopped:
        if runtime.is_main:
            ERR.print(str(stopped), markup=False, soft_wrap=True)
        summary = {"finished": False, "method": method.label, "step": stopped.step}
    if runtime.is_main:
        show_summary(json, str(artifact), summary)


@app.command()
def audit(
    run: RunPath,
    data: Annotated[Path | None, typer.Option(help="Default: the data it was trained on.")] = None,
    code_tokens: Annotated[
        int, typer.Option(help="Stop coding after so many tokens; 0 codes every document.")
    ] = 0,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Check a run's size, scores and codec. Exit code 1 if a rule fails."""
    from underpar.core.run_folder import RunFolder
    from underpar.core.runtime import open_runtime
    from underpar.stages import audit as stage

    runtime = open_runtime(device)
    verdict, findings = stage.audit(RunFolder(run), runtime, data, code_tokens, quiet=json)
    if json:
        show_json({"verdict": verdict, "findings": [f.as_dict() for f in findings]})
    else:
        rows = [(f.rule, f.verdict, f.summary) for f in findings]
        show_table(f"audit of {run}: {verdict}", ("rule", "verdict", "evidence"), rows)
    raise typer.Exit(1 if verdict == "fail" else 0)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, the first one's page.")],
    out: Annotated[Path | None, typer.Option(help="Default: report.html in the first run.")] = None,
    json: Json = False,
) -> None:
    """One self-contained HTML page of one or more runs."""
    from underpar.core.run_folder import RunFolder
    from underpar.report.build import build_report

    folders = [RunFolder(run) for run in runs]
    path = build_report(folders, out or folders[0].report_file)
    show_json({"report": str(path)}) if json else typer.echo(f"report: {path}")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="A benchmark, or 'list'.")] = "list",
    quads: Annotated[int, typer.Option(help="A B B A rounds.")] = 12,
    block_seconds: Annotated[float, typer.Option(help="Shortest timed block.")] = 2.0,
    warmup_seconds: Annotated[float, typer.Option(help="Alternating warm-up.")] = 30.0,
    input_: Annotated[
        Path | None, typer.Option("--input", help="Corpus for data benchmarks; default: demo.")
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Time two variants of one job, interleaved, with a control that can refuse the result."""
    from underpar.core.runtime import open_runtime
    from underpar.lab.bench import run_bench
    from underpar.lab.benches import describe_benches, find_bench

    if name == "list":
        docs = describe_benches()
        show_json(docs) if json else show_table("benchmarks", ("name", "what"), docs.items())
        return
    chosen = find_bench(name, open_runtime(device), input_)
    with progress_bar(name, 2 * quads, quiet=json) as bar:
        result = run_bench(
            chosen, quads, block_seconds, warmup_seconds, lambda done, _: bar.update(done)
        )
    if json:
        show_json(result.as_dict())
        return
    OUT.print(f"{result.what}\n{result.label_b} against {result.label_a}: {result.verdict}")
    OUT.print(result.reason)
    if result.verdict != "refused":
        low, high = result.ratio_interval.low, result.ratio_interval.high
        OUT.print(f"time ratio {result.ratio:.4f}, 95 % interval {low:.4f} to {high:.4f}")


@app.command()
def speed(
    recipe: RecipeName,
    steps: Annotated[int, typer.Option(help="Steps after the warm-up, half looped.")] = 50,
    set_: Set = None,
    device: Device = "auto",
    attention: Attention = "auto",
    compiled: Compiled = None,
    json: Json = False,
) -> None:
    """Take training steps on made-up documents: tokens a second, memory, traces.

    A second compilation after the warm-up, or a break of the graph, is an error.
    """
    from dataclasses import asdict

    from underpar.build.model import build_model
    from underpar.core.runtime import open_runtime, seed_everything
    from underpar.lab.steps import measure_steps

    resolved = load_checked(recipe, set_)
    runtime = open_runtime(device, compiled)
    choose_attention(attention, runtime)
    seed_everything(resolved.train.seed)
    model = build_model(resolved).to(runtime.device)
    with progress_bar("speed", 1, quiet=json) as bar:
        measured = measure_steps(model, resolved.train, runtime, steps, bar.update)
    if json:
        show_json(asdict(measured))
        return
    rows = [(p.visits, p.steps, p.step_ms, round(p.tokens_per_second)) for p in measured.phases]
    show_table(recipe, ("visits#", "steps#", "ms a step#", "tokens/s#"), rows)
    OUT.print(
        f"attention {measured.attention}, {measured.num_graphs} graphs compiled in "
        f"{measured.warmup_seconds:.1f} s of warm-up, peak {measured.memory_bytes / 1e9:.1f} GB"
    )


class TakesLists(TyperCommand):
    """Lets `--with` take all words up to the next option: `compare A B --with C D`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat `--with` before each of its words, which is what the parser understands."""
        spelled: list[str] = []
        inside = False
        for word in args:
            if word.startswith("--"):
                inside = word == "--with"
                spelled += [] if inside else [word]
            else:
                spelled += ["--with", word] if inside else [word]
        return super().parse_args(ctx, spelled)


@app.command(cls=TakesLists)
def compare(
    old: Annotated[list[str], typer.Argument(help="Runs, score files or numbers: the old side.")],
    new: Annotated[list[str], typer.Option("--with", help="The new side: all that follows.")],
    method: Annotated[str, typer.Option(help="Which score of a run, by name.")] = "plain",
    json: Json = False,
) -> None:
    """Is the new side better? Welch and seed-paired tests, with the seeds it would take."""
    from underpar.lab.compare import compare as compare_results
    from underpar.lab.compare import read_result

    sides = [[read_result(text, method) for text in side] for side in (old, new)]
    result = compare_results(*sides)
    if json:
        show_json(result)
        return
    rows = []
    for test in result["tests"]:
        interval = "{low:.4f} to {high:.4f}".format(**test["interval"])
        sizes = f"{test['num_old']} / {test['num_new']}"
        rows.append((test["test"], sizes, test["margin"], test["gain"], interval, test["p"]))
    columns = ("test", "runs#", "margin#", "gain (BPB)#", "95 % interval#", "p, one-sided#")
    show_table("lower bits per byte is better", columns, rows)
    needed = result["seeds_needed_for_this_gain"]
    OUT.print(f"seeds a side to show this gain at p < 0.01 with power 0.8: {needed or 'none will'}")


@app.command()
def ablate(
    recipe: RecipeName,
    data: DataPath,
    out: Annotated[Path, typer.Option(help="Folder for all runs and the result.")],
    lever: Annotated[
        list[str] | None,
        typer.Option(help="Leave out this one, may be repeated; default: each of the model."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of the whole recipe: their spread.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens that every run trains on.")] = 60_000_000,
    jobs: Annotated[int, typer.Option(help="Runs at a time; one compiles, one trains.")] = 2,
    known: Annotated[
        Path | None, typer.Option(help="An ablation.json whose runs need not be made again.")
    ] = None,
    set_: Set = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Train a recipe with several seeds, and once without each lever: what is each worth?

    \b
    underpar ablate pr2014 --data data --out runs/worth
    underpar ablate pr2014 --data data --out runs/two --lever smear --lever xsa
    underpar ablate pr2014 --data data --out runs/more --known runs/two/ablation.json
    underpar ablate pr2014+cpu --data tiny --out runs/tiny --tokens 60000

    All runs train on the same number of tokens, whatever the recipe's budget. Levers that do
    nothing without another are left out with it. The loop, and levers that need it, are compared
    with loops on from the first step. The result is OUT/ablation.json and OUT/ablation.md. The same
    command continues what was stopped. Exit code 2 if a run failed.
    """
    from underpar.core.run_folder import RunFolder, write_atomic, write_json
    from underpar.core.runtime import open_runtime
    from underpar.core.versions import device_name, versions
    from underpar.data.folder import data_identity, load_data
    from underpar.lab import ablate as lab
    from underpar.lab.lever_docs import ablation_rows, ablation_section

    def show(job: lab.Job, bpb: float | None, done: int, total: int) -> None:
        said = "failed" if bpb is None else f"{bpb:.4f} bits per byte"
        if not json:
            ERR.print(f"{done} of {total}, {job.name}: {said}", markup=False)

    request = lab.Request(recipe, tuple(set_ or ()), tuple(lever or ()), seeds, tokens)
    plan = lab.make_plan(request)
    identity = data_identity(load_data(data, verify=False))
    # Runs are compared with each other: those of another device or torch are no part of it.
    here = {"device": device_name(open_runtime(device).device), "versions": versions()}
    here |= {"data_identity": identity}
    before = lab.read_known(known, plan, here) if known else lab.Known({}, {})
    left = replace(plan, jobs=tuple(job for job in plan.jobs if job.name not in before.bpb))
    launch = lab.launcher(recipe, data, out, device)
    outcome = lab.run_plan(left, out, launch, jobs, identity, show)
    for name, reason in outcome.failed.items():
        tail = lab.read_tail(out / name)
        ERR.print(f"run {out / name} failed, {reason}:\n{tail}", markup=False, soft_wrap=True)
    result = lab.summarize(plan, before.bpb | outcome.bpb)
    result |= before.conditions or lab.read_conditions(RunFolder(out / next(iter(plan.seeds))))
    write_json(out / "ablation.json", result)
    write_atomic(out / "ablation.md", ablation_section(result) + "\n")
    if json:
        show_json(result)
    else:
        columns, rows = ablation_rows(result)
        show_table(f"{recipe} without one lever", columns, rows)
    raise typer.Exit(2 if outcome.failed else 0)


@app.command()
def doctor(device: Device = "auto", json: Json = False) -> None:
    """What this machine can do: versions, devices, attention backends, speeds."""
    from underpar.core.runtime import open_runtime
    from underpar.stages.doctor import diagnose

    facts = diagnose(open_runtime(device))
    if json:
        show_json(facts)
        return
    flat: dict[str, object] = {}
    for key, value in facts.items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"{key} {name}".strip(): v for name, v in inner.items()}
    show_pairs("this machine", flat)
