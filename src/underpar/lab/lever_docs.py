"""Lever cards as text: the document docs/levers.md, and the facts that the command line shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any

from underpar.lab.claims import Claim, read_claims
from underpar.lab.lever_cards import (
    ABLATION,
    NOT_MEASURED,
    Effect,
    LeverCard,
    cost_of,
    lost_mark,
    read_effects,
)
from underpar.recipe import ModelSpec

# Columns; a trailing '#' sets numbers to the right.
SUMMARY = ("stage", "what", "parameters#", "MFLOP per token#")

INTRODUCTION = """# Levers

A lever is one idea in one file. It plugs into a named seam of the stack (`src/underpar/seams.py`)
and does nothing unless a recipe names it. `docs/lever-walkthrough.md` walks through one file line
by line.

This page is made from the files of the levers and from `effects.toml`, `variants.toml` and
`ablation.json` in `src/underpar/lab`. After a change of one of them run

    underpar levers --markdown > docs/levers.md

`underpar levers` prints a table of all levers, `underpar levers NAME` everything about one.

## All levers

Levers that share a seam act in the order of this table, whatever the order of the recipe.

"""

GUIDE = """## How to switch one on

In a recipe, with a table of the settings that differ from the defaults:

```toml
[levers.qk_gain]
init = 4.0
```

On the command line, where `true` takes the defaults and `false` takes a lever out of a recipe:

    underpar train baseline --data data --set levers.qk_gain=true
    underpar train baseline --data data --set levers.qk_gain.init=4.0

Levers of stage "infer" act in scoring: name them in the recipe and use `underpar score --adapt`, or
name them with `underpar score --with LEVER`.

## What the figures mean

The cost of a lever is what it adds, with default settings, to the model of {num_layers} layers of
{dim} with a vocabulary of {vocab_size:,} ({num_parameters:,} parameters), or to that model with the
levers it needs. Only levers of stage "model" add something.

- **Parameters**, trained or not.
- **MFLOP per token**: millions of floating-point operations of one forward pass over a segment of
  {context:,} tokens; the model without levers takes {mega_flops:.1f}. A multiply-add of a matrix
  product counts as two; attention as four per channel of a query and key it sees; any other
  operation as one per element of its largest tensor. Operations are not seconds: those that are not
  matrix products take longer than their count says.
- **Bytes**: two per parameter (fp16, before entropy coding). This is an upper bound, because
  recipes may quantize a lever's tensors. The bytes of a lever's code are not in it.
- **Measured**: by this project. 1 mBPB is a thousandth of a bit per byte, and "better" means fewer
  bits with the lever. Figures under "Source" are those of the sources. Most figures are of one run;
  the setting says which. "lost twice" marks a lever that made things worse in two measurements
  or more and never helped; {lost}."""

CLAIMS = """## Published effects, and ours

"Ours" was measured by this project, on its own text, models and budgets, and mostly with other
settings than the published figure: the section of the lever has them. "Same direction" says no more
than that: a gain where a gain was published, or a loss where a loss was. The claims with a name are
measured by `underpar lab variants --claim NAME`.

{table}"""

# What an effect says of a claim that the lever helps.
DIRECTIONS = {
    "helps": "same direction",
    "hurts": "other direction",
    "none": "not shown",
    "cost": "time only",
}

MEASURED = """## One recipe without each lever

`underpar ablate` measures what a lever is worth to a whole stack. {recipe} (hash
{recipe_hash}) was trained on {tokens:,} tokens ({device}) with the seeds {seeds}:
{mean:.4f} bits per byte of held-out text, with a standard deviation of {sd:.2f} mBPB. Each row is
one run of the first seed without a lever.

- **Difference**: above 0 the stack is worse without the lever.
- **Noise**: the difference that chance alone stays within at two standard deviations, given so few
  seeds (Student's t). A difference within the noise shows nothing. Of levers that have no effect,
  one in 22 lies beyond the noise all the same.
- Short runs favor what learns fast: a lever may be worth more, or less, in a run of full length.
{remark}{loops}
{table}"""

LOOPS = """- **Loops on**: the loop, and levers that need it, are compared with one run that loops
  from the first step on ({bpb:.4f} bits per byte). With the recipe's schedule the two runs would be
  equal until the loop starts.
"""


def to_markdown(cards: Sequence[LeverCard], ablation: Traversable = ABLATION) -> str:
    """The document: a table of all levers, a guide, what was measured, a section per lever."""
    spec, plain = ModelSpec(), cost_of(())
    effects = {card.name: read_effects(card.name) for card in cards}
    lost = [name for name, listed in effects.items() if lost_mark(listed)]
    guide = GUIDE.format(
        num_layers=spec.num_layers,
        dim=spec.dim,
        vocab_size=spec.vocab_size,
        context=spec.context,
        num_parameters=plain.num_parameters,
        mega_flops=plain.flops_per_token / 1e6,
        lost=f"so far {', '.join(lost)}" if lost else "no lever has so far",
    )
    rows = (
        (f"[{card.name}](#{card.name})", *summary_row(card), headline(effects[card.name]))
        for card in cards
    )
    table = _table(("lever", *SUMMARY, "measured"), rows)
    measured = ablation_section(json.loads(ablation.read_text())) if ablation.is_file() else ""
    sections = (_section(card, effects[card.name]) for card in cards)
    claims = claims_section(list(read_claims().values()), effects)
    parts = (INTRODUCTION + table, guide, claims, measured, *sections)
    return "\n\n".join(filter(None, parts)) + "\n"


def claims_section(claims: Sequence[Claim], effects: Mapping[str, Sequence[Effect]]) -> str:
    """Published effects beside ours."""
    columns = ("lever", "claim", "published", "source", "ours", "verdict", "name")
    rows = []
    for claim in claims:
        ours, verdict = _beside(claim, effects.get(claim.lever, ()))
        name = f"`{claim.name}`" if claim.variants else ""
        published = (f"[{claim.lever}](#{claim.lever})", claim.claim, claim.published, claim.source)
        rows.append((*published, ours, verdict, name))
    return CLAIMS.format(table=_table(columns, rows))


def _beside(claim: Claim, effects: Sequence[Effect]) -> tuple[str, str]:
    """Our effect and the verdict on a claim."""
    found = [effect for effect in effects if effect.claim == claim.name]
    if not claim.variants:
        found = found or list(effects)
    if not found:
        return f"{NOT_MEASURED} yet", ""
    verdict = found[0].verdict
    if claim.hurts:
        verdict = {"helps": "hurts", "hurts": "helps"}.get(verdict, verdict)
    return found[0].figure, DIRECTIONS[verdict]


def headline(effects: Sequence[Effect]) -> str:
    """The first effect of a lever, and how many more there are."""
    if not effects:
        return NOT_MEASURED
    first, *others = effects
    worse = sum(effect.verdict == "hurts" for effect in others)
    more = f"; {len(others)} more" if others else ""
    return lost_mark(effects) + first.figure + more + (f", {worse} worse" if worse else "")


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
        f"{_mega(card.flops_per_token)} MFLOP per token{percent}"
    )
    facts = {
        "Stage": card.stage,
        "Source": card.source,
        "Legal": card.legal,
        "Cost": card.cost,
        "Adds": adds,
        "Measured": card.measured,
        "Needs": ", ".join(card.needs),
        "Neutral": card.neutral,
    }
    return {title: text for title, text in facts.items() if text}


def card_rows(card: LeverCard) -> list[tuple[str, str]]:
    """Everything about a lever except its first line, as titles and texts."""
    note, meanings = meanings_of(card)
    rows = [("Why", card.why), *facts_of(card).items(), ("Settings", note)]
    for s in card.settings:
        rows.append((f"  {s.name}", f"{s.type}, default {s.default}: {meanings[s.name]}"))
    return [(title, text) for title, text in rows if text]


def meanings_of(card: LeverCard) -> tuple[str, dict[str, str]]:
    """The note on all settings, and what each one sets: "`name`: ..." in the docstring."""
    if not card.settings:
        return card.settings_note, {}
    names = "|".join(setting.name for setting in card.settings)
    note, *parts = re.split(rf"`({names})`: ", card.settings_note)
    return note.strip(), dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


def _section(card: LeverCard, effects: Sequence[Effect]) -> str:
    facts = facts_of(card)
    if effects:
        lines = (f"\n  - {e.figure}: {e.setting} ({e.where})" for e in effects)
        facts["Measured"] = lost_mark(effects).rstrip() + "".join(lines)
    bullets = "\n".join(f"- **{title}**: {text}" for title, text in facts.items())
    note, meanings = meanings_of(card)
    rows = [(f"`{s.name}`", s.type, f"`{s.default}`", meanings[s.name]) for s in card.settings]
    table = _table(("setting", "type", "default#", "what it sets"), rows) if rows else ""
    blocks = (f"## {card.name}", card.what, card.why, bullets, note and f"Settings: {note}", table)
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
