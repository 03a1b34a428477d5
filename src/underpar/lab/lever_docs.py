"""Lever cards as text: the document docs/levers.md, and the facts that the command line shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from underpar.lab.lever_cards import LeverCard, cost_of
from underpar.recipe import ModelSpec

# Columns; a trailing '#' sets numbers to the right.
SUMMARY = ("stage", "what", "parameters#", "MFLOP a token#")

PREAMBLE = """# Levers

A lever is one idea in one file. It plugs into a named seam of the stack (`src/underpar/seams.py`),
does nothing unless a recipe names it, and says where it comes from and why it is legal. This
document is made from those files: change them and run

    underpar levers --markdown > docs/levers.md

`underpar levers` prints the table below, `underpar levers NAME` all about one lever.

## How to switch one on

In a recipe, with a table of the settings that differ from the defaults:

```toml
[levers.qk_gain]
init = 4.0
```

On the command line, where `true` takes the defaults and `false` takes a lever out of a recipe:

    underpar train baseline --data data --set levers.qk_gain=true
    underpar train baseline --data data --set levers.qk_gain.init=4.0

Levers that share a seam act in the order of the table, whatever the order of the recipe.

## What the figures mean

They are what a lever adds, with default settings, to the model of {num_layers} layers of {dim} with
{vocab_size:,} pieces ({num_parameters:,} parameters), or to that model with the levers it needs.
Levers of other stages than "model" add nothing to it.

- **Parameters**, trained or not.
- **MFLOP a token**: floating-point operations of one forward pass over a piece of {context:,}
  tokens, in millions; the model without levers takes {mega_flops:.1f}. A multiply-add of a matrix
  product counts two; attention four for each channel of a query and each key it sees; any other
  operation one for each element of its largest tensor. Operations are not seconds: those that are
  no matrix product take longer than their count says.
- **Bytes**: two a parameter (fp16, before entropy coding), an upper bound, as recipes may quantize
  a lever's tensors. Its code, which counts too, is not in it.
- **Measured**: in this project. Figures under "Source" are those of the sources.

## All levers

"""

# What `underpar ablate` wrote, where its result is part of the package.
ABLATION = resources.files("underpar.lab").joinpath("ablation.json")

MEASURED = """## Measured here

What a lever is worth to a whole stack, as `underpar ablate` measures it. {recipe} (hash
{recipe_hash}) was trained on {tokens:,} tokens ({device}) with the seeds {seeds}:
{mean:.4f} bits per byte of held-out text, with a standard deviation of {sd:.2f} mBPB. Each row is
one run of the first seed without a lever.

- **Difference**: thousandths of a bit per byte; above 0 the stack is worse without the lever.
- **Noise**: the difference that chance alone stays within at two standard deviations, given so few
  seeds (Student's t). Differences within it say nothing; of levers that do nothing, one in 22
  lies beyond it all the same.
- Short runs favor what learns fast: a lever may be worth more, or less, in a run of full length.
{remark}{loops}
{table}"""

LOOPS = """- **Loops on**: the loop, and what needs it, is compared with one run that loops from the
  first step on ({bpb:.4f} bits per byte): in a schedule much of the run would not tell them apart.
"""


def to_markdown(cards: Sequence[LeverCard], ablation: Traversable = ABLATION) -> str:
    """The document: what a lever is, a summary of all, what was measured, a section each."""
    spec, plain = ModelSpec(), cost_of(())
    preamble = PREAMBLE.format(
        num_layers=spec.num_layers,
        dim=spec.dim,
        vocab_size=spec.vocab_size,
        context=spec.context,
        num_parameters=plain.num_parameters,
        mega_flops=plain.flops_per_token / 1e6,
    )
    columns = ("lever", *SUMMARY, "bytes#", "measured")
    rows = (
        (f"[{c.name}](#{c.name})", *summary_row(c), f"{c.num_bytes:,}", c.measured) for c in cards
    )
    measured = ablation_section(json.loads(ablation.read_text())) if ablation.is_file() else ""
    blocks = [preamble + _table(columns, rows), measured, *map(_section, cards)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def ablation_section(result: Mapping[str, Any]) -> str:
    """The result of `underpar ablate` as a section of the document."""
    always = result["loops_on"]
    columns, rows = ablation_rows(result)
    return MEASURED.format(
        recipe=" with ".join(f"`{part}`" for part in (result["recipe"], *result["overrides"])),
        recipe_hash=result["recipe_hash"],
        tokens=result["tokens"],
        device=result["device"],
        seeds=", ".join(map(str, result["seeds"])),
        mean=result["baseline"]["mean"],
        sd=1000 * result["baseline"]["sd"],
        remark=f"- {result['remark']}\n" if result.get("remark") else "",
        loops="" if always is None else LOOPS.format(bpb=always),
        table=_table(columns, rows),
    )


def ablation_rows(result: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: a lever left out, bits per byte, difference, noise, and which is larger."""
    columns = ("without", "bits per byte#", "difference, mBPB#", "noise, mBPB#", "beyond noise")
    rows: list[tuple[str, ...]] = []
    for row in result["levers"]:
        remarks = [f"and {name}" for name in row["also_dropped"]]
        remarks += ["loops on"] if row["loops_on"] else []
        without = f"{row['lever']} ({', '.join(remarks)})" if remarks else row["lever"]
        difference, noise = f"{row['difference_mbpb']:+.2f}", f"{row['noise_mbpb']:.2f}"
        beyond = "yes" if row["beyond_noise"] else "no"
        rows.append((without, f"{row['bpb']:.4f}", difference, noise, beyond))
    return columns, rows


def summary_row(card: LeverCard) -> tuple[str, ...]:
    """A lever's cells under the columns of SUMMARY."""
    return card.stage, card.what, f"{card.num_parameters:,}", _mega(card.flops_per_token)


def facts_of(card: LeverCard) -> dict[str, str]:
    """What is known of a lever besides its description and settings, by title."""
    percent = f" ({card.flops_percent:+.3g} % of the forward pass)" if card.flops_per_token else ""
    adds = (
        f"{_counted(card.num_parameters, 'parameter')}, {_counted(card.num_bytes, 'byte')}, "
        f"{_mega(card.flops_per_token)} MFLOP a token{percent}"
    )
    facts = {
        "Stage": card.stage,
        "Source": card.source,
        "Legal": card.legal,
        "Measured": card.measured,
        "Needs": ", ".join(card.needs),
        "Adds": adds,
        "Neutral": card.neutral,
    }
    return {title: text for title, text in facts.items() if text}


def card_rows(card: LeverCard) -> list[tuple[str, str]]:
    """All about a lever but its first line, as titles and texts."""
    rows = [("Why", card.why)] if card.why else []
    rows += [*facts_of(card).items(), ("Settings", card.settings_note)]
    return rows + [(f"  {s.name}", f"{s.type}, default {s.default}") for s in card.settings]


def _section(card: LeverCard) -> str:
    facts = "\n".join(f"- **{title}**: {text}" for title, text in facts_of(card).items())
    rows = [(f"`{s.name}`", s.type, f"`{s.default}`") for s in card.settings]
    table = _table(("setting", "type", "default#"), rows) if rows else ""
    settings = f"Settings: {card.settings_note}"
    blocks = (f"## {card.name}", card.what, card.why, facts, settings, table)
    return "\n\n".join(filter(None, blocks))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rules = ["---:" if column.endswith("#") else "---" for column in columns]
    head = [column.rstrip("#") for column in columns]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *cells))


def _mega(flops: int) -> str:
    return f"{flops / 1e6:+.3g}" if flops else "0"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
