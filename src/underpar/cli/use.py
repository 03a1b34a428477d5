"""Commands that use a model: compress, decompress, export, generate, inspect."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from underpar.cli import results
from underpar.cli.console import open_progress, show_json
from underpar.cli.options import ArtifactPath, Device, Json, app
from underpar.errors import UnderparError


@app.command()
def compress(
    artifact: ArtifactPath,
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Any file, a data folder, or - for a pipe.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The compressed file, or -.")],
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Learn while coding, as 'score --adapt' does.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Let the file decode on every machine, CPU or GPU.")
    ] = False,
    decoder_memory: Annotated[
        float,
        typer.Option(
            metavar="GB", help="With --exact: what a decoder may need. More is faster on a GPU."
        ),
    ] = 8.0,
    split: Annotated[
        str,
        typer.Option(help=r"What stands between two documents, such as '\n\n' or '\0'."),
    ] = "",
    index: Annotated[
        bool, typer.Option("--index", help="Let 'decompress --document' read one document.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Decode the result before it is written; the file says if not.")
    ] = True,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Compress a file with the artifact's predictions; the result is decoded as a check.

    \b
    underpar compress runs/mine/model.upar book.txt book.upz
    underpar compress runs/mine data held-out.upz --adapt
    underpar compress runs/mine book.txt book.upz --exact

    Text like the training text gets the smallest. Any bytes can be compressed. Of a data folder the
    held-out documents are compressed, so that the file is their score.
    """
    from underpar.core.run_folder import artifact_at
    from underpar.core.runtime import open_runtime
    from underpar.stages import use

    summary = use.compress(
        artifact_at(artifact),
        source,
        out,
        open_runtime(device),
        open_progress(json),
        adapt=adapt,
        exact=exact,
        decoder_gb=decoder_memory,
        separator=use.separator_of(split),
        indexed=index,
        verify=verify,
    )
    if out != use.PIPE:
        results.show(json, summary, results.compressed(summary, source, out))


@app.command()
def decompress(
    artifact: ArtifactPath,
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file made by 'compress', or -.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to restore, or -.")],
    document: Annotated[
        int | None, typer.Option(help="One document alone, from 0; the file needs an index.")
    ] = None,
    any_machine: Annotated[
        bool, typer.Option(help="Try even if the file was compressed with other software.")
    ] = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Give back the file that was compressed with the same artifact.

    \b
    underpar decompress runs/mine/model.upar book.upz book.txt

    The file names the artifact and the software that wrote it; others are refused, because other
    software may round probabilities differently. A checksum guards the result.
    """
    from underpar.core.run_folder import artifact_at
    from underpar.core.runtime import open_runtime
    from underpar.stages import use

    summary = use.decompress(
        artifact_at(artifact),
        source,
        out,
        open_runtime(device),
        any_machine,
        open_progress(json),
        document,
    )
    if out != use.PIPE:
        results.show(json, summary, results.decompressed(summary, source, out))


@app.command()
def export(
    artifact: ArtifactPath,
    out: Annotated[Path, typer.Option(help="A file that ends with .pt2 or .onnx.")],
    json: Json = False,
) -> None:
    """Write the forward pass for other programs: torch.export (.pt2) or ONNX (.onnx).

    \b
    underpar export runs/mine --out model.pt2
    underpar export runs/mine --out model.onnx

    Tokens of one document in, BOS (1) first; log-probabilities of each next token out. The file is
    compared with the artifact before it is written. ONNX needs the packages onnx and onnxscript.
    """
    from underpar.core.run_folder import artifact_at
    from underpar.core.runtime import open_runtime
    from underpar.stages.export import export as run_stage

    summary = run_stage(artifact_at(artifact), out, open_runtime("cpu"))
    results.show(json, summary, results.exported(summary))


@app.command()
def generate(
    artifact: ArtifactPath,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="Lower is safer; 0 always takes the likeliest token.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens with this much probability.")
    ] = 0.95,
    top_k: Annotated[
        int, typer.Option(help="Draw from so many of the likeliest tokens; 0: from all.")
    ] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Write text with an artifact, and print it as it comes.

    \b
    underpar generate runs/mine/model.upar "The government"
    underpar generate runs/mine/model.upar "The" --max-tokens 50 --temperature 0 --seed 1
    underpar generate runs/mine/model.upar "The" --top-k 40 --stop "."
    """
    from dataclasses import asdict

    from underpar import load
    from underpar.infer.generate import Sampling, generate

    sampling = Sampling(max_tokens, temperature, top_p, seed, top_k, tuple(stop or ()))
    model = load(artifact, device)
    pieces = generate(model.predictor, model.tokenizer, prompt, sampling)
    if json:
        show_json({"prompt": prompt, "text": "".join(pieces), **asdict(sampling)})
        return
    typer.echo(prompt, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()


@app.command()
def inspect(
    artifact: ArtifactPath,
    text: Annotated[str, typer.Argument(help="The text itself.")] = "",
    file: Annotated[Path | None, typer.Option(help="Read the text from this file.")] = None,
    adapt: Annotated[
        bool, typer.Option(help="With the recipe's scoring levers, which learn from what was read.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the colored text to this page as well.")
    ] = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Show the surprise of each token of a text, in bits, as colors.

    \b
    underpar inspect runs/mine "The government announced on Monday"
    underpar inspect runs/mine --file page.txt --adapt --html page.html
    underpar inspect runs/mine "The" --json

    A token costs as many bits in a compressed file. The text is one document, and its end is priced
    too. A page by --html looks as the text in the report and needs no network.
    """
    from underpar import load
    from underpar.cli.console import show_colored
    from underpar.core.run_folder import write_atomic
    from underpar.report.surprise import characters, legend, levels_of, page_of
    from underpar.stages.use import read_input

    if (file is None) == (not text):
        raise UnderparError("give a text, or the name of its file with --file")
    # Unlike that of Path, this test says of a text that is too long for a name: no file.
    if os.path.isfile(text):
        command = shlex.join(["inspect", str(artifact), "--file", text])
        raise UnderparError(f"{text} is a file; run 'underpar {command}'")
    raw = text.encode(errors="surrogateescape") if file is None else read_input(file)
    model = load(artifact, device)
    tokens = model.log_probs(raw, adapt)
    bits = [token.bits for token in tokens]
    figures: dict[str, Any] = {
        "bytes": len(raw),
        "bits": sum(bits),
        "bits_per_byte": sum(bits) / len(raw),
        "adapted": adapt,
        "tokens": [
            {
                "token": t.token,
                "text": t.text.decode(errors="replace"),
                "bytes": len(t.text),
                "bits": t.bits,
            }
            for t in tokens
        ],
    }
    if chunks := model.chunks(raw):
        figures["chunks"] = [chunk.decode(errors="replace") for chunk in chunks]
    pieces = list(characters([token.text for token in tokens], bits))
    result = results.inspected(figures, pieces)
    if html is not None:
        write_atomic(html, page_of(result.sentence, result.rows, pieces))
    results.show(json, figures, result)
    if not json:
        show_colored(legend(), " ")
        show_colored(levels_of(pieces))
