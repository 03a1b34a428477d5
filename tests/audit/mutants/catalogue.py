"""The list of all cheats for people: `python tests/audit/mutants/catalogue.py` writes README.md."""

from __future__ import annotations

from pathlib import Path

from data_cheats import DATA_CHEATS
from patched_scorers import PATCHED
from run_cheats import NAMES_AND_SIZES, SCORE_FILES

HEAD = """# Cheats that the audit must catch

Each row is a small edit of a run folder or of a data folder, or a patch of the scorer. Every
checksum, total and identity that the cheater can compute again fits the edit. The tests make each
edit on a tiny run and run the rule that is named; the slow tests run the whole audit, which may
never say pass. "opening" means that the audit refuses the files before any rule. "not shown" means
that an honest run could look the same, so the rule asks for evidence instead of failing the run.

This file is written by `python tests/audit/mutants/catalogue.py`.
"""
TAIL = """
## Tests with texts, tokenizers or models of their own

`test_texts.py`: a byte sidecar shifted by one token, a document as one piece of the tokenizer, a
tokenizer that folds case, held-out documents that are missing in shard and source, files that
decide the split, a model that was trained on the held-out text. `test_binding_verdict.py`: files
that change during or after the audit, forged and partial verdicts, wider limits, exit codes.
`test_honest.py`: runs that no rule may accuse.
"""


def catalogue() -> str:
    """README.md of this folder."""
    tables = {"Score files": SCORE_FILES, "Names, sizes and clocks": NAMES_AND_SIZES}
    tables |= {"Data folder": DATA_CHEATS}
    parts = [HEAD]
    for title, mutants in tables.items():
        rows = [f"| {m.name} | {m.edits} | {m.rule} | {m.verdict} |" for m in mutants]
        parts += [f"\n## {title}\n", "| cheat | what is edited | rule | verdict |"]
        parts += ["|---|---|---|---|", *rows]
    parts += ["\n## Patched scorers\n", "| cheat | method | rule | verdict |", "|---|---|---|---|"]
    parts += [f"| {p.name} | {p.method.label} | {p.rule} | {p.verdict} |" for p in PATCHED]
    return "\n".join([*parts, TAIL])


if __name__ == "__main__":
    Path(__file__).with_name("README.md").write_text(catalogue())
