"""Commands that make a model: recipe, levers, train, calibrate, quantize, pack, size, demo."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    choose_attention,
    load_checked,
    quant_part,
    show_summary,
)
from underpar.core.console import show_json, show_table

if TYPE_CHECKING:
    from underpar.artifact.budget import Budget
    from underpar.core.run_folder import RunFolder
    from underpar.recipe import Recipe

Cap = Annotated[int | None, typer.Option(help="Byte cap, code counted; default: the recipe's.")]
SetQuant = Annotated[
    list[str] | None, typer.Option("--set", help="Change quant.*, as in quant.lqer_tensors=3")
]

recipe_app = typer.Typer(help="List the shipped recipes, or print one resolved.")
app.add_typer(recipe_app, name="recipe")


@recipe_app.command("list")
def recipe_list(json: Json = False) -> None:
    """The shipped recipes with one line each."""
    from underpar.recipe import list_recipes

    found = list_recipes()
    show_json(found) if json else show_table("recipes", ("name", "what"), found.items())


@recipe_app.command("show")
def recipe_show(recipe: RecipeName, set_: Set = None, json: Json = False) -> None:
    """The resolved recipe: every value, after bases, overlays and --set."""
    from underpar.recipe import to_toml, to_tree

    resolved = load_checked(recipe, set_)
    if json:
        show_json({"hash": resolved.hash, **to_tree(resolved)})
    else:
        # Plain, so that the text stays TOML at any width.
        typer.echo(f"# {recipe}, hash {resolved.hash}\n{to_toml(resolved)}")


@app.command()
def levers(
    name: Annotated[str | None, typer.Argument(help="A lever; default: a table of all.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/levers.md.")] = False,
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
        found = {card.name: asdict(card) for card in cards}
        show_json(found if name is None else found[name])
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
        Path | None, typer.Option(help="Continue this run with its own recipe and data.")
    ] = None,
    stop_behind: Annotated[
        Path | None, typer.Option(help="Stop when worse than this run, from 30 % of the budget on.")
    ] = None,
    margin: Annotated[float, typer.Option(help="How much worse is hopeless, in nats.")] = 0.1,
    device: Device = "auto",
    attention: Attention = "auto",
    compiled: Compiled = None,
    json: Json = False,
) -> None:
    """Train a recipe inside its budget. A killed run continues with the same command.

    \b
    underpar train baseline --data data --out runs/mine
    underpar train --resume runs/mine
    underpar train baseline --data data --set train.seed=7 --stop-behind runs/mine
    """
    from underpar.compile.startup import warm_compiler
    from underpar.core.runtime import open_runtime

    # First of all: workers may take 15 s to start.
    runtime = open_runtime(device, compiled)
    warm_compiler(runtime)
    from underpar.core.run_folder import RunFolder
    from underpar.stages import train as stage

    resolved, data, folder = _what_to_train(recipe, data, out, set_, resume)
    choose_attention(attention, runtime)
    reference = None
    if stop_behind is not None:
        reference = stage.open_reference(RunFolder(stop_behind), data, margin)
    summary = stage.train(resolved, data, folder, runtime, json, reference)
    if runtime.is_main:
        show_summary(json, str(folder.path), summary)


def _what_to_train(
    recipe: str | None,
    data: Path | None,
    out: Path | None,
    set_: list[str] | None,
    resume: Path | None,
) -> tuple[Recipe, Path, RunFolder]:
    """Recipe, data and run folder, from the options or from the run to continue."""
    from underpar.core.run_folder import RunFolder
    from underpar.errors import RecipeError
    from underpar.stages import train as stage

    if resume is None:
        if recipe is None or data is None:
            raise RecipeError("train needs a RECIPE and --data FOLDER, or --resume RUN")
        resolved = load_checked(recipe, set_)
        out = out or Path("runs") / f"{Path(recipe).stem}-{resolved.hash}"
        return resolved, data, RunFolder(out)
    given = {"RECIPE": recipe, "--data": data, "--out": out, "--set": set_}
    names = ", ".join(name for name, value in given.items() if value)
    if names:
        raise RecipeError(f"--resume {resume} has its own recipe and data; leave out {names}")
    run = RunFolder(resume)
    return run.read_recipe(), stage.data_of(run), run


@app.command()
def pack(
    run: RunPath,
    cap: Cap = None,
    set_: SetQuant = None,
    tokenizer_apart: Annotated[
        bool,
        typer.Option(
            "--tokenizer-apart", help="Name the tokenizer by its hash; its bytes still count."
        ),
    ] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Quantize and entropy-code a run's weights into RUN/model.upar, under the byte cap.

    \b
    underpar pack runs/mine
    underpar pack runs/mine --cap 8000000
    underpar pack runs/mine --set "quant.rules=['blocks.* grid8+columns', '* fp16']"

    Schemes gridS have no size of their own: one constant sets all their steps, and is chosen so
    that the file fills the cap. A model rounded by 'underpar quantize' is packed as it is.
    """
    from underpar.core.run_folder import RunFolder
    from underpar.core.runtime import open_runtime
    from underpar.stages import pack as stage

    folder = RunFolder(run)
    part = quant_part(folder, set_)
    budget = stage.pack(folder, open_runtime(device), cap, part, json, not tokenizer_apart)
    _show_budget(budget, str(folder.artifact_file), json)


@app.command()
def calibrate(
    run: RunPath,
    data: Annotated[
        Path | None, typer.Option("--data", help="Default: the folder it was trained on.")
    ] = None,
    source: Annotated[
        str,
        typer.Option("--text", help="train, or self for text that the model writes (slower)."),
    ] = "",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure what a run's matrices meet and what their errors cost: RUN/calibration.safetensors.

    \b
    underpar calibrate runs/mine
    underpar calibrate runs/mine --text self

    'underpar train' does it at the end of a run whose rules need it, inside the budget where the
    recipe keeps train.reserve_seconds. Held-out text cannot be named.
    """
    from underpar.core.run_folder import RunFolder
    from underpar.core.runtime import open_runtime
    from underpar.stages.calibrate import calibrate as run_stage
    from underpar.stages.train import data_of

    folder = RunFolder(run)
    data = data or data_of(folder)
    found = run_stage(folder, data, open_runtime(device), source)
    show_summary(json, str(folder.calibration_file), found)


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

    'underpar pack' does it too, where it was not done with the same weights, rules and cap.
    """
    from underpar.core.run_folder import RunFolder
    from underpar.core.runtime import open_runtime
    from underpar.stages import pack as stage

    folder = RunFolder(run)
    found = stage.quantize(folder, open_runtime(device), cap, quant_part(folder, set_), json)
    show_summary(json, str(folder.quantized_file), found)


@app.command()
def unpack(
    artifact: ArtifactPath,
    out: Annotated[Path, typer.Option(help="A .safetensors file.")],
    json: Json = False,
) -> None:
    """The weights of an artifact as they are scored, in fp32, for other tools.

    \b
    underpar unpack runs/mine/model.upar --out weights.safetensors
    """
    from underpar.stages.pack import unpack_artifact

    show_summary(json, str(out), unpack_artifact(artifact, out))


@app.command()
def size(
    recipe: RecipeName,
    tokenizer: Annotated[Path | None, typer.Option(help="Count this tokenizer's bytes.")] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Forecast a recipe's bytes before training, by packing random weights of its shapes."""
    from underpar.stages.pack import forecast_size

    budget = forecast_size(load_checked(recipe, set_), tokenizer)
    _show_budget(budget, f"forecast for {recipe}", json)
    budget.enforce()


def _show_budget(budget: Budget, title: str, json: bool) -> None:
    if json:
        show_json(budget.as_dict())
        return
    parts = sorted(budget.classes.items(), key=lambda item: -item[1])
    rows = [*parts, ("total", budget.total_bytes), ("left", budget.cap_bytes - budget.total_bytes)]
    show_table(f"{title}: {budget.num_weights:,} weights", ("what", "bytes#"), rows)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for data and run.")] = Path("demo"),
    set_: Set = None,
    json: Json = False,
) -> None:
    """Everything end to end on the embedded corpus, on a CPU, in under three minutes."""
    from underpar.stages.demo import run_demo

    result = run_demo(load_checked("demo", set_), out, quiet=json)
    if json:
        show_json(result)
    raise typer.Exit(1 if result["audit"] == "fail" else 0)
