"""Commands of the lab: bench, speed, ablate, doctor, and `underpar lab` with its tools."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from underpar.cli.console import OUT, open_progress, show_json, show_pairs, show_result, show_table
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
    takes_words,
)
from underpar.errors import BenchError

lab_app = typer.Typer(
    help="Measurements behind the claims: parity, quantization, scoring, attention, seeds.",
    no_args_is_help=True,
)
app.add_typer(lab_app, name="lab")

OutFolder = Annotated[Path, typer.Option(help="Folder for the results; a second run continues.")]


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="A benchmark, or 'list'.")] = "list",
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE]...",
            help="Two or more for 'step' and 'scoring', one for 'roofline'; 'operator' takes the "
            "operator first; an artifact and texts for 'codec'.",
        ),
    ] = None,
    quads: Annotated[int, typer.Option(help="Rounds of A B B A; an even number.")] = 12,
    block_seconds: Annotated[float, typer.Option(help="Shortest timed block, in seconds.")] = 2.0,
    warmup_seconds: Annotated[
        float, typer.Option(help="Seconds of warm-up with both variants in turn.")
    ] = 30.0,
    input_: Annotated[
        Path | None, typer.Option("--input", help="Corpus for data benchmarks; default: demo.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change both recipes: KEY=VALUE; or one of them: B=KEY=VALUE."),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(help="A file with faster parts, may be repeated: B=FILE (lab/candidates.py)."),
    ] = None,
    attention: Annotated[
        list[str] | None, typer.Option(help="A backend of attention: flash, or B=flash.")
    ] = None,
    compile_: Annotated[
        list[str] | None,
        typer.Option("--compile", help="off, default, or a mode of torch.compile: B=max-autotune."),
    ] = None,
    revision: Annotated[
        list[str] | None,
        typer.Option(help="A git revision of underpar, for 'step': B=HEAD~3."),
    ] = None,
    rewrites: Annotated[
        list[str] | None,
        typer.Option(
            help="Forms in which training computes the network: auto, none, or names with commas: "
            "A=none, B=folded_scales,fused_skips (docs/speed.md)."
        ),
    ] = None,
    at: Annotated[
        float, typer.Option(help="Progress of training, 0 to 1: sets loops and context.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result as JSON, Markdown and SVG.")
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Time two variants of one job, interleaved, with a control that can refuse the result.

    \b
    underpar bench                       a list of all
    underpar bench coder
    underpar bench attention --device cuda
    underpar bench data --input texts.jsonl
    underpar bench step h200-300s h200-300s --candidate B=FILE.py --at 0.6 --out bench
    underpar bench step pr2014 pr2014 --compile B=max-autotune-no-cudagraphs
    underpar bench step h200-300s h200-300s --set B=levers.lanes=false
    underpar bench step h200-300s h200-300s --rewrites A=none
    underpar bench step demo demo demo --candidate B=b.py --candidate C=c.py
    underpar bench step h200-300s h200-300s --revision A=HEAD~3
    underpar bench operator mlp h200-300s h200-300s --candidate B=FILE.py
    underpar bench scoring h200-300s h200-300s --attention B=flash
    underpar bench roofline h200-300s --out roof
    underpar bench ceilings
    underpar bench codec runs/mine/model.upar news.txt novel.txt --out codec

    The control times a variant against itself. If it shows a difference, there is no result.
    'step' times training steps and refuses sides whose gradients are wrong; 'roofline' says which
    kernels a step spends its time in, and what bounds them (docs/benchmarking.md). 'codec' holds
    compressed files of an artifact against those of xz, bzip2, zstd, brotli, PPMd and zpaq.
    """
    from underpar.core.runtime import open_runtime
    from underpar.lab.bench import run_bench
    from underpar.lab.bench_report import rows_of, sentence_of, write_bench
    from underpar.lab.benches import describe_benches, find_bench, refuse_options
    from underpar.lab.part_bench import compare_parts
    from underpar.lab.revisions import open_revisions
    from underpar.lab.roofline import measure_ceilings, profile_recipe, to_markdown
    from underpar.lab.step_bench import LETTERS, compare_steps, open_sides, read_variants

    if name == "list":
        docs = describe_benches()
        show_json(docs) if json else show_table("benchmarks", ("name", "what"), docs.items())
        return
    progress, settings = open_progress(json), (quads, block_seconds, warmup_seconds)
    options = {
        "overrides": set_ or [],
        "candidates": candidate or [],
        "attention": attention or [],
        "compiled": compile_ or [],
        "rewrites": rewrites or [],
    }
    if name != "step":
        refuse_options(name, {"revision": revision or []})
    if name == "codec":
        refuse_options(name, options)
        _bench_codec([Path(side) for side in sides or ()], out, device, json)
        return
    if name == "ceilings":
        refuse_options(name, {"recipes": sides or [], **options})
        found = measure_ceilings(open_runtime(device))
        if json:
            show_json(asdict(found))
            return
        OUT.print(f"products {found.flops / 1e12:.4g} TFLOP/s, copies {found.bytes / 1e9:.4g} GB/s")
        return
    if name == "roofline":
        variant = read_variants((sides or [])[:1], options, 1)[0]
        roofline = profile_recipe(variant, at, open_runtime(device), out, progress)
        show_json(roofline.as_dict()) if json else typer.echo(to_markdown(roofline))
        return
    if name == "step":
        variants = read_variants(sides or (), options | {"revision": revision or []})
        if any(variant.revision for variant in variants):
            with open_revisions(variants, at, device, progress) as (resident, twin):
                steps = compare_steps(resident, *settings, progress, twin)
        else:
            opened = open_sides(variants, at, open_runtime(device), progress)
            steps = compare_steps(opened, *settings, progress)
        results = [(step.bench, step.details()) for step in steps]
    elif name in ("operator", "scoring"):
        words = sides or []
        part, recipes = (name, words) if name == "scoring" else ("".join(words[:1]), words[1:])
        variants = read_variants(recipes, options)
        parts = compare_parts(part, variants, at, open_runtime(device), *settings, progress)
        results = [(result, {}) for result in parts]
    else:
        refuse_options(name, {"recipes": sides or [], **options})
        chosen = find_bench(name, open_runtime(device), input_)
        results = [(run_bench(chosen, *settings, progress), {})]
    if out is not None:
        folders = [out / letter for letter in LETTERS[1:]] if len(results) > 1 else [out]
        for folder, pair in zip(folders, results, strict=False):
            write_bench(folder, *pair)
    if json:
        documents = [result.as_dict() | details for result, details in results]
        show_json(documents if len(documents) > 1 else documents[0])
        return
    for result, details in results:
        show_result(sentence_of(result), rows_of(result, details))


def _bench_codec(paths: list[Path], out: Path | None, device: str, json: bool) -> None:
    from underpar.core.run_folder import artifact_at
    from underpar.core.runtime import open_runtime
    from underpar.lab import codec_table

    if len(paths) < 2:
        raise BenchError("name an artifact and texts: underpar bench codec ARTIFACT TEXT...")
    artifact, *texts = paths
    progress = open_progress(json)
    record = codec_table.measure(artifact_at(artifact), texts, open_runtime(device), progress)
    if out is not None:
        codec_table.write_results(record, out)
    if json:
        show_json(record)
        return
    show_result(codec_table.sentence_of(record), codec_table.rows_of(record))
    for text in record["texts"]:
        title = f"{text['name']}, {text['bytes']:,} bytes"
        show_table(title, codec_table.COLUMNS, codec_table.cells_of(text))


@app.command()
def speed(
    recipe: RecipeName,
    steps: Annotated[
        int, typer.Option(help="Steps after the warm-up; half of them with the loop on.")
    ] = 50,
    set_: Set = None,
    device: Device = "auto",
    attention: Attention = "auto",
    compiled: Compiled = None,
    json: Json = False,
) -> None:
    """Take training steps on made-up documents: tokens per second, memory, compiled graphs.

    \b
    underpar speed h200-300s
    underpar speed pr2014+cpu --steps 4 --device cpu
    underpar speed pr2014 --attention flash --no-compile

    A compilation after the warm-up, or a graph break, is an error.
    """
    from underpar.build.recipe import load_checked
    from underpar.core.runtime import open_runtime
    from underpar.lab.steps import measure_recipe

    resolved = load_checked(recipe, set_ or ())
    runtime = open_runtime(device, compiled)
    choose_attention(attention, runtime)
    measured = measure_recipe(resolved, runtime, steps, open_progress(json))
    if json:
        show_json(asdict(measured))
        return
    rows = [(p.visits, p.steps, p.step_ms, round(p.tokens_per_second)) for p in measured.phases]
    show_table(recipe, ("visits#", "steps#", "ms per step#", "tokens/s#"), rows)
    OUT.print(
        f"attention {measured.attention}, {measured.num_graphs} graphs compiled in "
        f"{measured.warmup_seconds:.1f} s of warm-up, peak {measured.memory_bytes / 1e9:.1f} GB"
    )


@app.command()
def ablate(
    recipe: RecipeName,
    data: DataPath,
    out: Annotated[Path, typer.Option(help="Folder for all runs and the result.")],
    lever: Annotated[
        list[str] | None,
        typer.Option(help="Leave out this lever, may be repeated; default: each of the model."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Runs of the whole recipe; their spread is the noise.")
    ] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens that every run trains on.")] = 60_000_000,
    jobs: Annotated[
        int, typer.Option(help="Runs at a time: while one compiles, another trains.")
    ] = 2,
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
    nothing without another lever are left out with it. The loop, and levers that need it, are
    compared with a run whose loop is on from the first step. The result is OUT/ablation.json and
    OUT/ablation.md. The same command continues what was stopped. Exit code 2 if a run failed.
    """
    from underpar.lab import ablate as lab
    from underpar.lab.lever_docs import ablation_rows

    request = lab.Request(recipe, tuple(set_ or ()), tuple(lever or ()), seeds, tokens)
    progress = open_progress(json)
    result, failed = lab.run_ablation(request, data, out, device, jobs, known, progress)
    if json:
        show_json(result)
    else:
        columns, rows = ablation_rows(result)
        show_table(f"{recipe} without one lever", columns, rows)
    raise typer.Exit(2 if failed else 0)


@app.command()
def doctor(device: Device = "auto", json: Json = False) -> None:
    """What this machine can do: versions, device, attention, speeds, ranks, and a verdict.

    \b
    underpar doctor
    underpar doctor --device cpu --json

    Speeds are compared with known figures. The verdict says what will run here.
    """
    from underpar.core.runtime import open_runtime
    from underpar.stages.doctor import diagnose

    facts = diagnose(open_runtime(device))
    if json:
        show_json(facts)
        return
    flat: dict[str, object] = {}
    verdict = facts.pop("verdict")
    for key, value in facts.items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"{key} {name}".strip(): v for name, v in inner.items()}
    show_pairs("this machine", flat | {"verdict": "; ".join(verdict)})


@lab_app.command("start")
def lab_start(
    recipe: RecipeName,
    data: DataPath,
    set_: Set = None,
    warm: Annotated[int, typer.Option(help="Starts with the caches of the first one.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result as JSON and Markdown.")
    ] = None,
    device: Device = "auto",
    compiled: Compiled = None,
    json: Json = False,
) -> None:
    """How long does a training take to start? By phase, cold and warm, each in a fresh process.

    \b
    underpar lab start h200-300s --data data --out start
    underpar lab start demo --data data --compile

    Cold: the folders in which the compilers keep what they made are empty, and in a temporary
    place. Warm: the same again. Bytecode of Python is that of the machine.
    """
    from underpar.build.recipe import load_checked
    from underpar.core.run_folder import write_atomic, write_json
    from underpar.data.folder import load_data
    from underpar.lab.start_times import Request, measure_starts, to_markdown

    request = Request(recipe, str(data), tuple(set_ or ()), device, compiled)
    # A mistake is told here, before a process is started.
    load_checked(recipe, request.overrides)
    load_data(data)
    starts = measure_starts(request, warm, open_progress(json))
    document = {"request": asdict(request)} | {
        name: [asdict(start) | {"total": start.total} for start in group]
        for name, group in starts.items()
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "start.json", document)
        write_atomic(out / "start.md", to_markdown(starts))
    if json:
        show_json(document)
        return
    typer.echo(to_markdown(starts))


@lab_app.command("parity")
def lab_parity(
    recipe: RecipeName,
    data: DataPath,
    out: OutFolder,
    set_: Set = None,
    steps: Annotated[
        int, typer.Option(help="Steps per run; losses of the last quarter are compared.")
    ] = 200,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per step; a multiple of 4.")] = 98_304,
    device: Device = "cuda",
    json: Json = False,
) -> None:
    """Does training with compiler and kernels match simple code? Three runs of one seed.

    \b
    underpar lab parity pr2014 --data data --out runs/parity
    underpar lab parity baseline+cpu --data tiny --out parity --device cpu --steps 8

    'fast' trains as a GPU does by default, 'plain' without compiler and fast attention, 'split' as
    'plain' with smaller micro-batches, which shows the effect of rounding alone. Fast passes if it
    is as near to plain as split is. The result is OUT/parity.json. Exit code 1 if it fails.
    """
    from underpar.lab.parity import Request, run_parity

    request = Request(recipe, data, out, tuple(set_ or ()), steps, batch_tokens, device)
    result = run_parity(request, open_progress(json))
    if json:
        show_json(result)
    else:
        rows = [
            (
                name,
                run["micro_batches"],
                run["compiled"],
                run["attention"],
                f"{run['loss_nats']:.5f}",
            )
            for name, run in result["runs"].items()
        ]
        columns = ("run", "micro-batches#", "compiled", "attention", "loss, nats per token#")
        show_table(f"{recipe}: {result['verdict']}", columns, rows)
        OUT.print(
            f"fast - plain {result['fast_minus_plain_nats']:+.5f}, "
            f"plain - split {result['plain_minus_split_nats']:+.5f} nats per token"
        )
    raise typer.Exit(0 if result["verdict"] == "pass" else 1)


@lab_app.command("quant-curves")
def lab_quant_curves(
    run: RunPath,
    data: DataPath,
    out: OutFolder,
    sizes: Annotated[
        int,
        typer.Option(
            help="Points per curve, 2 to 8: steps of the published width times 1, 1.25, 0.8, 1.6..."
        ),
    ] = 4,
    documents: Annotated[
        int, typer.Option(help="Price this many held-out documents, the first ones; 0: all.")
    ] = 1000,
    tune_steps: Annotated[
        int,
        typer.Option(help="Steps of tuning the control tensors of curve (f), a batch per step."),
    ] = 30,
    zpaq: Annotated[
        Path | None,
        typer.Option(
            help="Program for curve (b) that compresses its standard input; default: lrzip or zpaq."
        ),
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """What rounding costs at what size: the published ways to store weights against ours.

    \b
    underpar lab quant-curves runs/mine --data data --out curves
    underpar lab quant-curves runs/mine --data data --out curves --sizes 2 --documents 100

    \b
    a   int6 matrices and int7 embedding, GPTQ, symbols through lzma
    b   the same by groups through lrzip or zpaq, with low-rank corrections (PR 2014)
    c   the symbols of a with our coder
    d   steps chosen by what errors cost; d+ by column too
    e   with a trellis; e+ by column too
    f   e+ with weighted corrections and tuned control tensors

    OUT gets quant_curves.json, .md and .svg. A run without a calibration gets one.
    """
    from underpar.core.run_folder import run_at
    from underpar.lab.quant_curves import Request, measure, write_results

    request = Request(run_at(run).path, data, out, sizes, documents, tune_steps, zpaq, device)
    record = measure(request, open_progress(json))
    table = write_results(record, out)
    show_json(record) if json else typer.echo(table)


@lab_app.command("scoring-table", cls=takes_words("--rows"))
def lab_scoring_table(
    artifact: ArtifactPath,
    data: DataPath,
    out: OutFolder,
    rows: Annotated[
        list[int] | None,
        typer.Option(help="Numbers of rows, up to the next option; default: all, 0 is plain."),
    ] = None,
    documents: Annotated[
        int, typer.Option(help="Score this many held-out documents, the first ones; 0: all.")
    ] = 0,
    device: Device = "auto",
    no_probes: Annotated[
        bool, typer.Option("--no-probes", help="Leave the verdicts to another run with this OUT.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(help="A TOML file of other rows: lab/adaptation.toml, lab/packing.toml."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Put the table into this page, such as docs/frontier.md.")
    ] = None,
    json: Json = False,
) -> None:
    """What each way to score gains and costs: one artifact, one text, one machine, a table.

    \b
    underpar lab scoring-table runs/mine/model.upar --data data --out table
    underpar lab scoring-table runs/mine/model.upar --data data --out table --rows 0 1 12
    underpar lab scoring-table runs/mine --data data-development --out adapt --no-probes \\
        --file src/underpar/lab/adaptation.toml

    Each row is 'underpar score' with other options. Gains are over the first row, with an interval
    over documents. The last column says whether later tokens or lengths change a price. Rows of a
    --file may also pack the run anew. OUT gets scoring.json and scoring.md. Numbers of the rows:

    \b
     0  plain
     1  sliding, stride 64
     2  sliding, stride 512
     3  sliding, stride 1024
     4  sliding, stride 1536
     5  sliding, stride 2048
     6  flat, stride 64
     7  flat, stride 512
     8  flat, stride 1024
     9  LoRA, published order
    10  LoRA, published order + global
    11  LoRA, stream, fresh keys
    12  LoRA, stream
    13  + global
    14  + tilt
    15  + hedge
    16  + match and counts
    17  SGD on all weights, stride 64
    18  SGD on all weights, flat, stride 64
    19  SGD on the last MLPs, stride 64
    20  SGD on the last MLPs, flat, stride 64
    """
    from underpar.core.run_folder import artifact_at
    from underpar.lab.scoring_table import Request, measure, to_markdown, write_page

    chosen = tuple(rows or ())
    path = artifact_at(artifact)
    request = Request(path, data, out, chosen, documents, device, not no_probes, file)
    record = measure(request, open_progress(json))
    if page:
        write_page(page, file, record)
    show_json(record) if json else typer.echo(to_markdown(record))


@lab_app.command("attention-table")
def lab_attention_table(device: Device = "auto", json: Json = False) -> None:
    """Milliseconds of each attention backend on real shapes, by context and window.

    \b
    underpar lab attention-table
    underpar lab attention-table --json

    98,304 tokens in bf16 on a GPU. On a CPU few tokens, which only shows that it works.
    """
    from underpar.core.runtime import open_runtime
    from underpar.kernels.attention import available
    from underpar.lab.attention_table import measure_rows

    runtime = open_runtime(device)
    backends = available(runtime.device, runtime.dtype)
    rows = list(measure_rows(runtime))
    if json:
        show_json({"backends": backends, "rows": [asdict(row) for row in rows]})
        return
    show_pairs("backends", backends)
    columns = ("backend", "pieces", "context#", "window#", "forward, ms#", "with backward, ms#")
    show_table("attention", columns, [tuple(asdict(row).values()) for row in rows])


@lab_app.command("seeds")
def lab_seeds(
    out: Annotated[Path, typer.Argument(metavar="OUT.md", help="The Markdown file to write.")],
    runs: Annotated[
        list[Path], typer.Argument(help="Runs of one recipe that differ in train.seed.")
    ],
    json: Json = False,
) -> None:
    """A Markdown section and a chart about runs of one recipe that differ in their seed.

    \b
    underpar lab seeds docs/results.md runs/seed-1 runs/seed-2 runs/seed-3

    A row per seed, mean and standard deviation, speeds; the chart is OUT.svg beside it.
    """
    from underpar.core.run_folder import run_at
    from underpar.lab.seeds import write_results

    chart = write_results(out, [run_at(run) for run in runs])
    show_json({"section": str(out), "chart": str(chart)}) if json else typer.echo(f"{out}\n{chart}")


@lab_app.command("results")
def lab_results(
    out: Annotated[Path, typer.Argument(metavar="OUT.md", help="The Markdown file to write.")],
    runs: Annotated[
        list[str], typer.Argument(metavar="[NAME=]RUN...", help="Run folders of any recipes.")
    ],
    public: Annotated[
        Path | None, typer.Option(help="A TOML file of public runs in place of the shipped one.")
    ] = None,
    json: Json = False,
) -> None:
    """One table about runs of several recipes, with the columns of PR 2014's table.

    \b
    underpar lab results OUT.md h200-300s=runs/1 h200-300s=runs/2 pr1219=runs/a

    Runs that differ only in their seed share a mean and two deviations: sample and population.
    Public runs on the same text stand below. Folders may be copies without weights. Of a page that
    exists, only the part between the two comment lines is replaced.
    """
    from underpar.lab.results import PUBLIC_RUNS, write_results

    write_results(out, runs, public or PUBLIC_RUNS)
    show_json({"page": str(out)}) if json else typer.echo(out)


@lab_app.command("variants")
def lab_variants(
    data: DataPath,
    out: Annotated[Path, typer.Option(help="Folder for all runs and the result.")],
    claim: Annotated[
        list[str] | None,
        typer.Option(help="Test this claim, may be repeated; default: all with variants."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A TOML file of claims in place of the shipped one.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each variant.")] = 1,
    jobs: Annotated[
        int, typer.Option(help="Runs at a time; more than 1 needs a budget of steps.")
    ] = 1,
    known: Annotated[
        Path | None, typer.Option(help="A variants.json whose figures need not be made again.")
    ] = None,
    set_: Set = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Test published claims: train, pack and score variants of a recipe and compare them.

    \b
    underpar lab variants --data data --out runs/claims --claim recurrence-start
    underpar lab variants --data data --out runs/claims --claim qat-lite --seeds 2
    underpar lab variants --data data --out runs/steps --claim recurrence-kind --jobs 2 \\
        --set train.budget_seconds=0 --set train.reserve_seconds=0 --set train.budget_steps=1000

    Variants with equal recipes share one run. The same command continues what was stopped. The
    result is OUT/variants.json and OUT/variants.md; OUT/effects.toml has the entries that
    docs/levers.md is made from. Exit code 2 if a stage failed.
    """
    from underpar.lab import variants as lab
    from underpar.lab.claims import VARIANTS

    names, overrides = tuple(claim or ()), tuple(set_ or ())
    request = lab.Request(file or VARIANTS, names, overrides, seeds)
    progress = open_progress(json)
    result, failed = lab.run_variants(request, data, out, device, jobs, known, progress)
    show_json(result) if json else typer.echo((out / "variants.md").read_text())
    raise typer.Exit(2 if failed else 0)


@lab_app.command("experiments")
def lab_experiments(
    data: Annotated[
        Path | None, typer.Option(help="The data folder; without one nothing is trained.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all runs and the result.")] = None,
    experiment: Annotated[
        list[str] | None,
        typer.Option(help="Make this experiment, may be repeated; default: all, in their order."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A TOML file of experiments in place of the shipped one.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs with and runs without each change.")] = 2,
    tokens: Annotated[
        int, typer.Option(help="Tokens that every run trains on; 0: the budget of the recipe.")
    ] = 0,
    seconds: Annotated[
        float, typer.Option(help="Start no run that would end after so many seconds; 0: no limit.")
    ] = 0.0,
    jobs: Annotated[
        int, typer.Option(help="Runs at a time on the device; more than 1 needs --tokens.")
    ] = 1,
    known: Annotated[
        Path | None, typer.Option(help="A variants.json whose runs need not be made again.")
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Only say which runs there is time for, and the bits per weight within the cap.",
        ),
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(help="Put the tables of all experiments into this page: docs/frontier.md."),
    ] = None,
    set_: Set = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Train a recipe with and without a change, on the same seeds: does the change help?

    \b
    underpar data build TEXT --out data --recipe h200-300s --development 0.1
    underpar lab experiments --data data-development --out runs/e --plan --seconds 1500
    underpar lab experiments --data data-development --out runs/e --seconds 1500
    underpar lab experiments --data data-development --out runs/f --known runs/e/variants.json
    underpar lab experiments --data data-development --out runs/e --tokens 60000000 --jobs 2
    underpar lab experiments --known runs/e/variants.json --page docs/frontier.md

    All experiments get their first seed, then their second. Each run is written to
    OUT/variants.json as soon as it has ended, and the same command continues what was stopped. A
    machine that is lent for a short time starts from an earlier result with --known. Exit code 2 if
    a run failed.
    """
    from underpar.errors import BenchError
    from underpar.lab import experiments as lab
    from underpar.lab.claims import EXPERIMENTS
    from underpar.lab.measurement import Allowance
    from underpar.lab.runs import token_budget
    from underpar.lab.variants import Request, run_variants

    overrides = (*(set_ or ()), *(token_budget(tokens) if tokens else ()))
    if data is None or out is None:
        if page is None or data or out:
            raise BenchError("name both --data and --out to train, or neither and a --page")
        lab.write_page(page, file or EXPERIMENTS, lab.read_record(known))
        return
    request = Request(file or EXPERIMENTS, tuple(experiment or ()), overrides, seeds)
    allowance = Allowance(seconds or float("inf"))
    if plan:
        rows = lab.plan_request(request, data, out, device, known, allowance, jobs)
        if json:
            show_json({"runs": [asdict(row) for row in rows]})
            return
        cells = [
            (
                row.name,
                ", ".join(row.uses),
                row.seed,
                row.seconds or "?",
                f"{row.bits:.2f}" if row.bits else "",
                row.state,
            )
            for row in rows
        ]
        show_table("plan", ("run", "for", "seed#", "seconds#", "bits per weight#", ""), cells)
        return
    progress = open_progress(json)
    result, failed = run_variants(
        request, data, out, device, jobs, known, progress, allowance=allowance
    )
    if page:
        lab.write_page(page, request.file, result)
    show_json(result) if json else typer.echo(lab.to_tables(request.file, result))
    raise typer.Exit(2 if failed else 0)
