"""Commands that make a model: demo, recipe, levers, train, calibrate, quantize, pack, size."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from underpar.cli import results
from underpar.cli.console import OUT, open_progress, show_json, show_table
from underpar.cli.options import (
    ArtifactPath,
    Attention,
    Compiled,
    Device,
    Json,
    RecipeName,
    RunPath,
    Set,
    app,
    audit_exit_code,
    choose_attention,
)

if TYPE_CHECKING:
    from underpar.core.run_folder import RunFolder
    from underpar.recipe import Recipe

Cap = Annotated[int | None, typer.Option(help="Byte cap, code counted; default: the recipe's.")]
SetQuant = Annotated[
    list[str] | None, typer.Option("--set", help="Change quant.*, as in quant.lqer_tensors=3")
]

recipe_app = typer.Typer(
    help="List the shipped recipes, or print one: resolved, or as its forward pass runs.",
    no_args_is_help=True,
)
app.add_typer(recipe_app, name="recipe")


@recipe_app.command("list")
def recipe_list(json: Json = False) -> None:
    """The shipped recipes with one line each.

    \b
    underpar recipe list
    """
    from underpar.recipe import list_recipes

    recipes = list_recipes()
    show_json(recipes) if json else show_table("recipes", ("name", "what"), recipes.items())


@recipe_app.command("show")
def recipe_show(
    recipe: RecipeName,
    forward: Annotated[
        bool, typer.Option("--forward", help="Print the network as its forward pass runs.")
    ] = False,
    against_published: Annotated[
        bool,
        typer.Option("--against-published", help="Where it differs from the published system."),
    ] = False,
    set_: Set = None,
    json: Json = False,
) -> None:
    """The resolved recipe: every value, after bases, overlays and --set.

    \b
    underpar recipe show pr2014
    underpar recipe show pr2014+cpu --set train.seed=7
    underpar recipe show pr2014 --forward
    underpar recipe show pr2014 --against-published

    --forward runs the network once, without weights, and prints what it saw: each visit of a
    block in order, each module and each lever's hook with the shapes of its tensors, then the
    parameters and forecast bytes per block.

    --against-published prints every deliberate deviation from the pull request that the recipe
    is named after, with its reason; for an overlay or --set also each value that it sets.

    Values that a table [scale] of an overlay changed stand above the recipe, with those before.
    """
    from underpar.build.recipe import load_checked
    from underpar.lab.deviations import value_at
    from underpar.recipe import scaled_values, to_toml, to_tree

    resolved = load_checked(recipe, set_ or ())
    if against_published:
        from underpar.lab.deviations import deviations_of, published_name
        from underpar.report.gather import show

        rows = deviations_of(recipe, resolved)
        if json:
            show_json([asdict(row) for row in rows])
        elif rows:
            columns = ("what", "published", "here", "why")
            cells = [(row.what, show(row.published), show(row.here), row.why) for row in rows]
            show_table(f"{recipe} and the published system", columns, cells)
        else:
            OUT.print(f"{recipe} differs nowhere from {published_name(recipe)} as published")
    elif forward:
        from underpar.lab.show_forward import observe_forward

        observed = observe_forward(resolved)
        show_json(observed.as_dict()) if json else typer.echo(observed.to_text(recipe))
    else:
        tree = to_tree(resolved, complete=True)
        # Without those that a later overlay or --set replaced.
        scaled = {key: v for key, v in scaled_values(recipe).items() if value_at(tree, key) == v[1]}
        if json:
            shown = {"scaled": scaled} if scaled else {}
            show_json({"hash": resolved.hash, **shown, **tree})
        else:
            # Plain, so that the text stays TOML at any width.
            typer.echo(f"# {recipe}, hash {resolved.hash}")
            for key, (before, after) in scaled.items():
                typer.echo(f"# scaled: {key} = {after}, from {before}")
            typer.echo(to_toml(resolved, complete=True))


@app.command()
def levers(
    name: Annotated[str | None, typer.Argument(help="A lever; default: a table of all.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the content of docs/levers.md.")
    ] = False,
    json: Json = False,
) -> None:
    """The levers: what each does, where it comes from, why it is legal, what it costs.

    \b
    underpar levers                 a table of all
    underpar levers smear           all about one
    underpar levers smear --json    the same for machines
    underpar levers --markdown > docs/levers.md

    \b
    Switch one on in a recipe, as docs/levers.md shows, or for one run:
    underpar train baseline --data data --set levers.smear=true
    underpar train baseline --data data --set levers.smear.width=16
    """
    from underpar.lab import lever_docs
    from underpar.lab.lever_cards import all_cards, read_card

    cards = all_cards() if name is None else [read_card(name)]
    if json:
        trees = {card.name: asdict(card) for card in cards}
        show_json(trees if name is None else trees[name])
    elif markdown:
        typer.echo(lever_docs.to_markdown(cards), nl=False)
    elif name is None:
        rows = [(card.name, *lever_docs.summary_row(card)) for card in cards]
        show_table("levers", ("lever", *lever_docs.SUMMARY), rows)
    else:
        show_table(cards[0].what, (name, ""), lever_docs.card_rows(cards[0]))


@app.command()
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A shipped recipe or a .toml file; stack overlays: baseline+cpu"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A folder made by 'underpar data build'.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME-HASH.")] = None,
    set_: Set = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue this run with its own recipe and data."),
    ] = None,
    stop_behind: Annotated[
        Path | None,
        typer.Option(
            help="From 30 % of the budget on, stop if the loss is worse than this run's.",
        ),
    ] = None,
    margin: Annotated[
        float, typer.Option(help="How much worse, in nats per token, stops it.")
    ] = 0.1,
    keep: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Keep so many checkpoints, from which the audit repeats steps."
        ),
    ] = 8,
    device: Device = "auto",
    attention: Attention = "auto",
    compiled: Compiled = None,
    json: Json = False,
) -> None:
    """Train a recipe within its budget. A killed run continues with the same command.

    \b
    underpar train baseline --data data --out runs/mine
    underpar train --resume runs/mine
    underpar train baseline --data data --set train.seed=7 --stop-behind runs/mine
    underpar train pr2014 --data data --keep 2        less disk: a checkpoint is 12 bytes per weight

    --keep counts from the start of a run. The last checkpoint is always kept.
    """
    from underpar.compile.startup import warm_compiler
    from underpar.core.runtime import open_runtime

    # First, because the compiler's worker processes may take 15 s to start.
    runtime = open_runtime(device, compiled)
    warm_compiler(runtime)
    from underpar.core.run_folder import run_at
    from underpar.stages import train as stage

    resolved, data, folder = _what_to_train(recipe, data, out, set_, resume)
    choose_attention(attention, runtime)
    reference = None
    if stop_behind is not None:
        reference = stage.open_reference(run_at(stop_behind), data, margin)
    progress = open_progress(json, runtime)
    summary = stage.train(resolved, data, folder, runtime, progress, reference, keep)
    if runtime.is_main:
        results.show(json, summary, results.trained(summary))


def _what_to_train(
    recipe: str | None,
    data: Path | None,
    out: Path | None,
    set_: list[str] | None,
    resume: Path | None,
) -> tuple[Recipe, Path, RunFolder]:
    """Recipe, data and run folder, from the options or from the run to continue."""
    from underpar.build.recipe import load_checked
    from underpar.core.run_folder import RunFolder, run_at
    from underpar.errors import RecipeError
    from underpar.stages import train as stage

    if resume is None:
        if recipe is None or data is None:
            raise RecipeError(
                "train needs a recipe and data, as in 'underpar train demo --data data --out "
                "runs/mine', or --resume RUN"
            )
        resolved = load_checked(recipe, set_ or ())
        out = out or Path("runs") / f"{Path(recipe).stem}-{resolved.hash}"
        return resolved, data, RunFolder(out)
    options = {"RECIPE": recipe, "--data": data, "--out": out, "--set": set_}
    names = ", ".join(name for name, value in options.items() if value)
    if names:
        raise RecipeError(f"--resume {resume} has its own recipe and data; leave out {names}")
    run = run_at(resume)
    return run.read_recipe(), stage.data_of(run), run


@app.command()
def pack(
    run: RunPath,
    cap: Cap = None,
    set_: SetQuant = None,
    tokenizer_apart: Annotated[
        bool,
        typer.Option(
            "--tokenizer-apart",
            help="Store only the tokenizer's hash in the file; its bytes still count.",
        ),
    ] = False,
    for_submission: Annotated[
        bool,
        typer.Option(
            "--for-submission",
            help="Count the bytes of train_gpt.py, which 'underpar submit' writes, as the code.",
        ),
    ] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Quantize and entropy-code a run's weights into RUN/model.upar, under the byte cap.

    \b
    underpar pack runs/mine
    underpar pack runs/mine --cap 8000000
    underpar pack runs/mine --for-submission
    underpar pack runs/mine --set "quant.rules=['blocks.* grid8+columns', '* fp16']"

    One constant sets the steps of all schemes gridS; it is chosen so that the file fills the cap.
    A model that 'underpar quantize' rounded with the same weights, rules and cap is not rounded
    again.
    """
    from underpar.build.recipe import quant_part
    from underpar.core.run_folder import run_at
    from underpar.core.runtime import open_runtime
    from underpar.stages import pack as stage
    from underpar.submit.train_script import train_script

    folder = run_at(run)
    part = quant_part(folder, set_ or ())
    progress = open_progress(json)
    script_bytes = len(train_script(folder.read_recipe())) if for_submission else None
    inside = not tokenizer_apart
    budget = stage.pack(
        folder, open_runtime(device).for_float64, cap, part, progress, inside, script_bytes
    )
    told = results.budget(
        budget.as_dict(), str(folder.artifact_file), f"score {shlex.quote(str(run))}"
    )
    results.show(json, budget.as_dict(), told)


@app.command()
def calibrate(
    run: RunPath,
    data: Annotated[
        Path | None, typer.Option("--data", help="Default: the folder it was trained on.")
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--text", help="train, or self: text that the model writes (slower); default: recipe's."
        ),
    ] = "",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure the inputs of a run's matrices and what errors in them cost: calibration.safetensors.

    \b
    underpar calibrate runs/mine
    underpar calibrate runs/mine --text self

    'underpar train' calls this at the end of a run whose quantization rules need it. The seconds
    count as training; train.reserve_seconds keeps a part of the budget for them. Held-out text is
    never read.
    """
    from underpar.core.run_folder import run_at
    from underpar.core.runtime import open_runtime
    from underpar.stages.calibrate import calibrate as run_stage
    from underpar.stages.train import data_of

    folder = run_at(run)
    data = data or data_of(folder)
    summary = run_stage(folder, data, open_runtime(device).for_float64, source)
    results.show(json, summary, results.calibrated(summary, folder.calibration_file))


@app.command()
def quantize(
    run: RunPath,
    cap: Cap = None,
    set_: SetQuant = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Round a run's weights to integers that fill the cap: RUN/quantized.safetensors.

    \b
    underpar quantize runs/mine
    underpar quantize runs/mine --set "quant.rules=['blocks.* gptq6:12.85', '* fp16']"

    'underpar pack' calls this too, unless it was done with the same weights, rules and cap.
    """
    from underpar.build.recipe import quant_part
    from underpar.core.run_folder import run_at
    from underpar.core.runtime import open_runtime
    from underpar.stages import pack as stage

    folder = run_at(run)
    part = quant_part(folder, set_ or ())
    summary = stage.quantize(
        folder, open_runtime(device).for_float64, cap, part, open_progress(json)
    )
    results.show(json, summary, results.quantized(summary, run, folder.quantized_file))


@app.command()
def unpack(
    artifact: ArtifactPath,
    out: Annotated[Path, typer.Option(help="A .safetensors file.")],
    json: Json = False,
) -> None:
    """Write the weights of an artifact in fp32, exactly as they are scored, for other tools.

    \b
    underpar unpack runs/mine/model.upar --out weights.safetensors
    """
    from underpar.core.run_folder import artifact_at
    from underpar.stages.pack import unpack_artifact

    summary = unpack_artifact(artifact_at(artifact), out)
    results.show(json, summary, results.unpacked(summary, out))


@app.command()
def size(
    recipe: RecipeName,
    tokenizer: Annotated[Path | None, typer.Option(help="Count this tokenizer's bytes.")] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Forecast a recipe's bytes before training, by packing random weights of its shapes.

    \b
    underpar size pr2014
    underpar size baseline --tokenizer data/tokenizer.model --set limits.cap_bytes=8000000

    Exit code 2 if the forecast is over the cap.
    """
    from underpar.build.recipe import load_checked
    from underpar.stages.pack import forecast_size

    budget = forecast_size(load_checked(recipe, set_ or ()), tokenizer)
    told = results.budget(budget.as_dict(), f"Forecast for {recipe}")
    results.show(json, budget.as_dict(), told)
    budget.enforce()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for data and run.")] = Path("demo"),
    set_: Set = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Audit all documents and training steps, not random ones."),
    ] = False,
    json: Json = False,
) -> None:
    """Everything end to end on the embedded corpus, on a CPU, in under three minutes.

    \b
    underpar demo
    underpar demo --out short --set train.budget_seconds=15

    Builds data, trains, packs, scores twice, audits, compresses, generates and writes a report.
    To save time, the audit repeats the plain score and the coding on a few random documents. The
    adapted score is repeated as a whole. Exit codes are those of 'underpar audit'.
    """
    from underpar.build.recipe import load_checked
    from underpar.stages.demo import run_demo

    result = run_demo(load_checked("demo", set_ or ()), out, open_progress(json), full)
    results.show(json, result, results.demo(result))
    if not json:
        OUT.print(result["text"], markup=False)
    raise typer.Exit(audit_exit_code(result["audit"]))
