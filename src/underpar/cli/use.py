"""Commands that use a model: compress, decompress, generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from underpar.cli.options import ArtifactPath, Device, Json, app, show_summary
from underpar.core.console import show_json


@app.command()
def compress(
    artifact: ArtifactPath,
    source: Annotated[Path, typer.Argument(metavar="IN", help="Any file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The compressed file.")],
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Compress a file with the artifact's predictions; it is decoded again before success."""
    from underpar.core.runtime import open_runtime
    from underpar.stages import use

    summary = use.compress(artifact, source, out, open_runtime(device), quiet=json)
    show_summary(json, f"{source} -> {out}", summary)


@app.command()
def decompress(
    artifact: ArtifactPath,
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file made by 'compress'.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the original goes.")],
    any_machine: Annotated[
        bool, typer.Option(help="Try although it was compressed on other software.")
    ] = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Give back the file that was compressed with the same artifact."""
    from underpar.core.runtime import open_runtime
    from underpar.stages import use

    summary = use.decompress(artifact, source, out, open_runtime(device), any_machine)
    show_summary(json, f"{source} -> {out}", summary)


@app.command()
def generate(
    artifact: ArtifactPath,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest share of tokens.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Write text with an artifact, as it comes."""
    from underpar import load

    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    pieces = load(artifact, device).stream(prompt, **options)
    if json:
        show_json({"prompt": prompt, "text": "".join(pieces), **options})
        return
    typer.echo(prompt, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
