"""Commands that make a model: recipe, levers, train, pack, size, demo."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from underpar.cli.options import (
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
    show_summary,
)
from underpar.console import show_json, show_table

if TYPE_CHECKING:
    from underpar.artifact.budget import Budget
    from underpar.recipe import Recipe
    from underpar.run import RunFolder

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
    from underpar.report import lever_docs
    from underpar.report.lever_cards import all_cards, read_card

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
    from underpar import verbs
    from underpar.run import RunFolder
    from underpar.runtime import open_runtime

    resolved, data, folder = _what_to_train(recipe, data, out, set_, resume)
    runtime = open_runtime(device, compiled)
    choose_attention(attention, runtime)
    reference = None
    if stop_behind is not None:
        reference = verbs.open_reference(RunFolder(stop_behind), data, margin)
    summary = verbs.train(resolved, data, folder, runtime, json, reference)
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
    from underpar import verbs
    from underpar.errors import RecipeError
    from underpar.run import RunFolder

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
    return run.read_recipe(), verbs.data_of(run), run


@app.command()
def pack(
    run: RunPath,
    cap: Annotated[int | None, typer.Option(help="Byte cap, code counted.")] = None,
    json: Json = False,
) -> None:
    """Quantize and entropy-code a run's weights into RUN/model.upar, under the byte cap."""
    from underpar.pipeline import pack_run
    from underpar.run import RunFolder

    _show_budget(pack_run(RunFolder(run), cap), str(run / "model.upar"), json)


@app.command()
def size(
    recipe: RecipeName,
    tokenizer: Annotated[Path | None, typer.Option(help="Count this tokenizer's bytes.")] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Forecast a recipe's bytes before training, by packing random weights of its shapes."""
    from underpar.pipeline import forecast_size

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
    from underpar.demo import run_demo

    result = run_demo(load_checked("demo", set_), out, quiet=json)
    if json:
        show_json(result)
    raise typer.Exit(1 if result["audit"] == "fail" else 0)
