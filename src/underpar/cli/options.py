"""What commands share: the app, its panels, option types, how a summary is shown."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from underpar import __version__
from underpar.cli.console import show_json, show_pairs

if TYPE_CHECKING:
    from underpar.core.runtime import Runtime

# The panels of --help, and the commands of each in the order of a first day.
PANELS = {
    "Start": ("demo", "doctor", "data", "recipe", "levers"),
    "Make a model": ("train", "calibrate", "quantize", "pack", "size"),
    "Judge it": ("score", "audit", "compare", "report"),
    "Use it": (
        "generate",
        "inspect",
        "compress",
        "decompress",
        "export",
        "unpack",
        "submit",
        "unbundle",
    ),
    "Measure": ("speed", "bench", "ablate", "lab"),
}

# The exit code of a process that the signal of a broken pipe has ended.
BROKEN_PIPE = 141


class ByPanel(TyperGroup):
    """Lists commands panel by panel, in the order of `PANELS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for panel, names in PANELS.items():
            for name in names:
                # typer reads the attribute when it prints help.
                vars(self.commands[name])["rich_help_panel"] = panel

    def invoke(self, ctx: Any) -> Any:
        """Run a command. typer would end a broken pipe with 1, the exit code of a failed audit."""
        words = [*ctx.args]
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise typer.Exit(BROKEN_PIPE) from error
        except Exception as error:
            _hint_at_file(error, words)
            raise

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        places = [name for names in PANELS.values() for name in names]
        return sorted(self.commands, key=places.index)


def _hint_at_file(error: Exception, words: list[str]) -> None:
    """Say of an unknown option that is a file how the file is named."""
    # typer's NoSuchOption has no public name.
    option = vars(error).get("option_name")
    files = [w for w in words if option and w.startswith(option) and os.path.isfile(w)]
    if files:
        vars(error)["message"] += f"; name the file as {shlex.quote(f'./{files[0]}')}"


app = typer.Typer(
    cls=ByPanel,
    help="Make the best language model that fits in a byte budget, and prove its score.",
    epilog="Start with: underpar demo. Every command explains itself: underpar train --help",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"underpar {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, before its line.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of all commands. `cli.main` reads --debug itself: errors end there."""


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a recipe value, may be repeated: train.matrix_lr=0.02"),
]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda or mps; auto takes a GPU if there is one, CUDA first.")
]
Attention = Annotated[
    str,
    typer.Option(help="auto, or a backend that 'underpar doctor' lists: fa4, flash, sdpa..."),
]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile", help="Compile training and adaptation; default: only on a GPU."
    ),
]
RecipeName = Annotated[
    str, typer.Argument(help="A shipped recipe or a .toml file; stack overlays: baseline+cpu")
]
DataPath = Annotated[Path, typer.Option("--data", help="A folder made by 'underpar data build'.")]
ArtifactPath = Annotated[Path, typer.Argument(help="A run folder, or its model.upar.")]
RunPath = Annotated[Path, typer.Argument(help="A folder made by 'underpar train'.")]


def takes_words(option: str) -> type[TyperCommand]:
    """A command whose `option` takes all words up to the next option: `compare A --with B C`."""

    class TakesWords(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            # The parser understands an option that is repeated before each of its words.
            spelled: list[str] = []
            inside = False
            for word in args:
                if word.startswith("--"):
                    inside = word == option
                    spelled += [] if inside else [word]
                else:
                    spelled += [option, word] if inside else [word]
            return super().parse_args(ctx, spelled)

    return TakesWords


def choose_attention(name: str, runtime: Runtime) -> None:
    """Choose the attention backend of this process; an unavailable one is an error."""
    from underpar.compile.startup import wait_for_workers
    from underpar.kernels.attention import set_backend, set_backend_aside

    if name == "auto":
        set_backend_aside(runtime.device, runtime.dtype, wait_for_workers)
    else:
        set_backend(name, runtime.device, runtime.dtype)


def show_summary(json: bool, title: str, summary: dict[str, Any]) -> None:
    """Print names and values as a table, or as JSON."""
    show_json(summary) if json else show_pairs(title, summary)


def audit_exit_code(verdict: str, is_strict: bool = False) -> int:
    """0 if a run may be believed, 1 if it failed, 3 if evidence is missing."""
    codes = {"fail": 1, "not shown": 1 if is_strict else 3}
    return codes.get(verdict, 0)
