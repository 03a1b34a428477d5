"""Each cheat is caught by the rule that is named for it, and no honest run is accused.

The tables of cheats are run_cheats.py, data_cheats.py and patched_scorers.py; README.md lists them.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from catalogue import catalogue
from data_cheats import DATA_CHEATS
from forge import CPU, Forge, Mutant, copy_of, finding_of
from patched_scorers import PATCHED, PatchedScorer
from run_cheats import RUN_CHEATS, pickle_weights

from tiny import TinyRun
from underpar.audit.finding import PASS
from underpar.audit.rules import run_audit
from underpar.errors import UnderparError
from underpar.stages.audit import AuditRequest, audit_run, open_case

MUTANTS = [*RUN_CHEATS, *DATA_CHEATS]


@pytest.fixture
def forge(tiny_run: TinyRun, tmp_path: Path) -> Forge:
    return copy_of(tiny_run.folder, tiny_run.data, tmp_path)


def request_of(forge: Forge) -> AuditRequest:
    return AuditRequest(forge.data, forge.limits, seed=0, code_tokens=300)


def test_names_are_unique() -> None:
    names = [cheat.name for cheat in (*MUTANTS, *PATCHED)]
    assert len(set(names)) == len(names)


def test_the_catalogue_lists_every_cheat() -> None:
    written = Path(__file__).with_name("README.md").read_text()
    assert written == catalogue(), "run python tests/audit/mutants/catalogue.py"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_named_rule_catches_the_cheat(forge: Forge, mutant: Mutant) -> None:
    mutant.change(forge)
    if mutant.rule == "opening":
        with pytest.raises(UnderparError):
            open_case(forge.run, CPU, request_of(forge))
        return
    case = open_case(forge.run, CPU, request_of(forge))
    finding = finding_of(run_audit(case, rules=[mutant.rule]), mutant.rule)
    assert finding.verdict == mutant.verdict, finding.summary


def test_a_pickle_is_not_run(forge: Forge) -> None:
    pickle_weights(forge)
    run_audit(open_case(forge.run, CPU, request_of(forge)), rules=["packing", "training"])
    assert not (forge.run.path / "was-run").exists()
    pickle.loads(forge.run.weights_file.read_bytes())
    assert (forge.run.path / "was-run").exists()


@pytest.mark.parametrize("cheat", PATCHED, ids=lambda cheat: cheat.name)
def test_the_score_of_a_patched_scorer_is_seen(forge: Forge, cheat: PatchedScorer) -> None:
    forge.run.score_file("adapt").unlink()
    with pytest.MonkeyPatch.context() as patch:
        cheat.patch(patch)
        forge.score(cheat.method)
    case = open_case(forge.run, CPU, request_of(forge))
    finding = finding_of(run_audit(case, rules=[cheat.rule]), cheat.rule)
    assert finding.verdict == cheat.verdict, finding.summary


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_no_cheat_passes_the_whole_audit(forge: Forge, mutant: Mutant) -> None:
    mutant.change(forge)
    try:
        audited = audit_run(forge.run, CPU, request_of(forge))
    except UnderparError:
        return
    assert audited.verdict != PASS
