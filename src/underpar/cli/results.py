"""What a command says at its end: a sentence, a table in words and units, the next command.

Each function reads the figures that --json prints.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from underpar.audit.finding import verdict_text
from underpar.cli.console import show_json, show_result
from underpar.core.words import (
    against_xz,
    bytes_text,
    change_text,
    count_text,
    number_text,
    percent_text,
    seconds_text,
)

# How many of the most surprising pieces of a text are named.
MOST_DEAREST = 5

Rows = Sequence[tuple[str, str]]
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """The sentence, the rows below it, and the command that usually comes next."""

    sentence: str
    rows: Rows = ()
    next: str = ""

    def show(self) -> None:
        """Print it on standard output."""
        show_result(self.sentence, self.rows, f"next: underpar {self.next}" if self.next else "")


def show(json: bool, figures: Figures, result: Result) -> None:
    """Print the result for people, or its figures as JSON."""
    show_json(figures) if json else result.show()


def trained(f: Figures) -> Result:
    """A run after `underpar train`, finished or not."""
    run, has_steps = f["run"], "step" in f
    done = f"{count_text(f['step'], 'step')} in {seconds_text(f['seconds'])}" if has_steps else ""
    bpb = f.get("average_bpb", f.get("live_bpb"))
    if f["finished"]:
        sentence = f"Trained {done}" if done else "Trained before: nothing was left to do"
        if bpb is not None:
            sentence += f": {bpb:.4f} bits per byte of held-out text, before quantization"
        todo = f"pack {shlex.quote(run)}"
    elif f.get("stopped"):
        sentence, todo = f"Ended early after {done}: {f['stopped']}", ""
    else:
        sentence, todo = (
            f"Stopped after {done}; the run can continue",
            f"train --resume {shlex.quote(run)}",
        )
    rows = [("run folder", run), ("recipe", f["recipe_hash"])]
    if has_steps:
        rows += [
            ("last loss", f"{f['loss']:.4f} nats per token"),
            ("training text read", count_text(f["tokens"], "token")),
            ("start-up, not counted", seconds_text(f["start_seconds"])),
        ]
    kinds = {"live_bpb": "held-out, last weights", "average_bpb": "held-out, averaged weights"}
    rows += [(name, f"{f[key]:.4f} bits per byte") for key, name in kinds.items() if key in f]
    if "forecast_bytes" in f:
        rows.append(("packed, about", bytes_text(f["forecast_bytes"])))
    compiled = "compiled" if f["compiled"] else "not compiled"
    rows.append(("attention", f"{f['attention']}, {compiled}"))
    return Result(f"{sentence}.", rows, todo)


def calibrated(f: Figures, file: object) -> Result:
    """After `underpar calibrate`."""
    text = "training text" if f["text"] == "train" else "text that the model wrote"
    sentence = f"Measured {count_text(f['tokens'], 'token')} of {text} in"
    return Result(f"{sentence} {seconds_text(f['seconds'])}.", [("file", str(file))])


def quantized(f: Figures, run: object, file: object) -> Result:
    """After `underpar quantize`."""
    sentence = f"{_room(f['total_bytes'], f['cap_bytes'])}, by a model of integers."
    rows = [
        ("step constant", f"{f['constant']:.6g}"),
        ("time", seconds_text(f["seconds"])),
        ("file", str(file)),
    ]
    return Result(sentence, rows, f"pack {shlex.quote(str(run))}")


def budget(f: Figures, what: str, todo: str = "") -> Result:
    """The bytes of an artifact or of a forecast, the largest part first."""
    from underpar.report.facts import parts_of

    total, cap = f["total_bytes"], f["cap_bytes"]
    rows = [
        (name, f"{bytes_text(size)}, {percent_text(size / max(total, 1))}")
        for name, size in parts_of(f["classes"], [(t["name"], t["bytes"]) for t in f["tensors"]])
    ]
    bits = 8 * f["model_file_bytes"] / max(f["num_weights"], 1)
    rows.append(("weights", f"{number_text(f['num_weights'], 0)}, {bits:.3f} bits each"))
    return Result(f"{what}: {_room(total, cap)}.", rows, todo)


def _room(total: int, cap: int) -> str:
    rest = bytes_text(abs(cap - total))
    return (
        f"{number_text(total, 0)} of {bytes_text(cap)}, {rest} {'left' if total <= cap else 'over'}"
    )


def scored(f: Figures, run: object) -> Result:
    """After `underpar score`."""
    if not f["finished"]:
        rows = [("method", f["method"]), ("step", number_text(f["step"], 0))]
        return Result("Stopped; the same command continues.", rows)
    ratio = f["bpb"] / f["xz_bpb"]
    sentence = f"{against_xz(ratio)}: {f['bpb']:.4f} bits per byte."
    rows = [
        ("method", f"{f['method']}, order {f['order']}"),
        ("held-out text", text_of(f)),
        ("xz -9, all in one file", f"{f['xz_bpb']:.4f} bits per byte"),
        ("model", f"{f['bpb']:.4f} bits per byte"),
        ("model with its own bytes", f"{f['bpb_with_artifact']:.4f} bits per byte"),
        ("time", seconds_text(f["seconds"])),
        ("file", f["file"]),
    ]
    if "cost_percent" in f:
        rows.insert(4, ("cost of exact mode", f"{f['cost_percent']:+.4f} % of the float score"))
    if f["stopped_at"] >= 0:
        rows.insert(1, ("learned until", f"step {f['stopped_at']:,}, when its time was spent"))
    return Result(sentence, rows, f"audit {shlex.quote(str(run))}")


def text_of(f: Figures) -> str:
    """The size of the held-out text of a score."""
    return f"{count_text(f['documents'], 'document')}, {bytes_text(f['bytes'])}"


def audited(findings: Sequence[tuple[str, str, str]], what: str, on_all: str) -> Result:
    """An audit: triples of rule, verdict and summary, and the verdict on all of them."""
    words = verdict_text([(rule, verdict) for rule, verdict, _ in findings], on_all)
    return Result(f"{what}: {words}.")


def demo(f: Figures) -> Result:
    """The closing table of the demo."""
    plain, adapted, coded = f["plain"], f["adapted"], f["document"]
    # Fewer bits per byte, more bits per byte: a ratio of rates, not of files.
    saved = 100 - plain["percent_of_xz"]
    share = f"{abs(saved):.1f} % {'fewer' if saved >= 0 else 'more'}"
    rows = [
        ("held-out text", text_of(plain)),
        ("xz -9, all in one file", f"{plain['xz_bpb']:.4f} bits per byte"),
        ("model", f"{plain['bpb']:.4f} bits per byte, {share} than xz"),
        ("model, adapting as it reads", f"{adapted['bpb']:.4f} bits per byte"),
        ("model with its own bytes", f"{plain['bpb_with_artifact']:.4f} bits per byte"),
        ("artifact and code", bytes_text(f["total_bytes"])),
        ("audit", f"{f['audit']}, on {f['audited']}"),
        ("one document", f"{coded['raw_bytes']:,} -> {coded['compressed_bytes']:,} bytes and back"),
        ("report", f["report"]),
        ("seconds", f"{f['seconds']:.0f}"),
    ]
    better = against_xz(plain["percent_of_xz"] / 100)
    checks = "all checks pass" if f["audit"] == "pass" else f"the audit says {f['audit']!r}"
    return Result(f"{better}; {checks}.", rows)


def compared(f: Figures) -> str:
    """`underpar compare` in a sentence."""
    p, gain = f["tests"][0]["p"], f["gain_bpb"]
    if not gain:
        return "Both sides have the same mean."
    words = f"The {'new' if gain > 0 else 'old'} side is better by {abs(gain):.6f} bits per byte"
    if gain > 0:
        words += f" (p {f'= {p:.4f}' if p >= 1e-4 else 'below 0.0001'})"
    met = [repr(rule["rule"]) for rule in f["acceptance"] if rule["is_met"]]
    return f"{words}; of the rules of the field it meets {' and '.join(met) or 'none'}."


def compressed(f: Figures, source: object, out: object) -> Result:
    """After `underpar compress`."""
    raw, size, xz = f["raw_bytes"], f["compressed_bytes"], f["xz_bytes"]
    better = against_xz(size / xz)
    sentence = f"{better}: {bytes_text(raw)} became {bytes_text(size)}."
    rows = [
        ("from, to", f"{source} -> {out}"),
        ("bits per byte", f"{f['bits_per_byte']:.4f}"),
        ("against the file", change_text(size / max(raw, 1))),
        ("xz -9", bytes_text(xz)),
        ("mode", f"{f['mode']}, {count_text(f['documents'], 'document')}"),
        ("lanes", _lanes(f)),
        ("decoded as a check", "yes" if f["verified"] else "no, and the file says so"),
        ("of which header", bytes_text(f["header_bytes"])),
        ("with the model", bytes_text(f["with_artifact_bytes"])),
    ]
    return Result(sentence, rows)


def _lanes(f: Figures) -> str:
    """Of a compressed file: how many are decoded side by side, and with how much memory."""
    if not f["decoder_bytes"]:
        return f"{f['lanes']:,}"
    return f"{f['lanes']:,}; a decoder needs up to {f['decoder_bytes'] / 1e6:,.0f} MB for them"


def decompressed(f: Figures, source: object, out: object) -> Result:
    """After `underpar decompress`."""
    sizes = f"{bytes_text(f['compressed_bytes'])} became {bytes_text(f['raw_bytes'])} again"
    return Result(
        f"{sizes}, equal to the original by checksum.", [("from, to", f"{source} -> {out}")]
    )


def inspected(f: Figures, pieces: Sequence[tuple[str, float]]) -> Result:
    """After `underpar inspect`, above the text; `pieces` are its characters with their bits."""
    sentence = f"{f['bits_per_byte']:.4f} bits per byte"
    if f["adapted"]:
        sentence += ", learning from what was read"
    dearest = sorted(pieces, key=lambda piece: -piece[1])[:MOST_DEAREST]
    rows = [
        ("text", f"{bytes_text(f['bytes'])} in {count_text(len(f['tokens']), 'token')}"),
        ("cost", f"{f['bits']:,.1f} bits, {f['tokens'][-1]['bits']:.1f} of them for its end"),
        ("most surprising", ", ".join(f"{text!r} {bits:.1f}" for text, bits in dearest)),
    ]
    if chunks := f.get("chunks"):
        mean = f["bytes"] / len(chunks)
        rows.append(("chunks", f"{len(chunks):,} of {mean:.2f} bytes: {'|'.join(chunks)}"))
    return Result(f"{sentence}.", rows)


def exported(f: Figures) -> Result:
    """After `underpar export`."""
    difference = f["largest_difference_nats"]
    compared = "not compared: onnxruntime is not installed"
    if difference is not None:
        compared = f"equal to the artifact within {difference:.1e} nats"
    rows = [
        ("tokens of a text", f"{f['least_tokens']} to {f['most_tokens']:,}, BOS first"),
        ("probabilities", f"natural logarithms for {f['vocab_size']:,} tokens"),
        ("compared", compared),
    ]
    return Result(f"Wrote {f['file']}, {bytes_text(f['bytes'])}.", rows)


def unpacked(f: Figures, out: object) -> Result:
    """After `underpar unpack`."""
    words = f"{count_text(f['weights'], 'weight')} in {count_text(f['tensors'], 'tensor')}"
    return Result(f"Wrote {words}.", [("file", str(out))])
