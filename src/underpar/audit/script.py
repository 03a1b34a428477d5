"""R16, R18: the counted script runs alone, in an empty folder, and gives the bits of the score.

The audit runs no foreign code. The script must be what this package bundles, byte for byte, before
it is run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import underpar
from underpar.audit.case import Case
from underpar.audit.finding import Finding, judge, not_shown
from underpar.audit.scores import num_other_documents
from underpar.core.makers import again
from underpar.data.folder import sidecar_name
from underpar.data.folder_writer import FolderWriter
from underpar.data.shards import Columns, Shard, pick_documents
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.data.value_files import open_values
from underpar.errors import RuleError
from underpar.score.ledger import Score, score_from_dict

# Random documents that the script scores, besides the last one of the text.
NUM_DOCUMENTS = 3
# Runs a script as a program. Then says where it looked first for modules, and where the modules of
# this package came from.
RUNNER = """
import json, runpy, sys
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
files = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "underpar"]
print(json.dumps([sys.path[0], *files]))
"""


def script(case: Case) -> Finding:
    """The script beside the artifact is the bundle, and scores documents as the score file says."""
    file = case.folder.script_file
    if not file.is_file():
        return not_shown("script", f"no {file.name} beside the artifact; {again(file)}")
    if file.read_bytes() != case.expected_script():
        return _other_script(case)
    if "plain" not in case.scores:
        return not_shown("script", "no plain score in the run")
    last = case.data.val.num_documents - 1
    some = case.rng.choice(last, min(NUM_DOCUMENTS, last), replace=False)
    chosen = [*sorted(map(int, some)), last]
    with TemporaryDirectory() as name:
        folder = Path(name)
        _write_data(case, chosen, folder / "data")
        (folder / "empty").mkdir()
        score, (unpacked, *modules) = _run(case, folder / "data", folder / "empty")
    # The script unpacks itself into a temporary folder, which is gone when it ends.
    is_temporary = not Path(unpacked).exists()
    inside = [file for file in modules if is_temporary and Path(file).is_relative_to(unpacked)]
    claimed = case.scores["plain"].entries
    num_other = num_other_documents(score.entries, [claimed[index] for index in chosen])
    return judge(
        "script",
        not num_other and 0 < len(inside) == len(modules),
        f"{len(inside)} of {len(modules)} modules came from the script; {num_other} of "
        f"{len(chosen)} documents have other bits than score-plain.json",
        documents=chosen,
        num_modules=len(modules),
        bits=[entry.bits for entry in score.entries],
    )


def _other_script(case: Case) -> Finding:
    """A script that is not the bundle: wrong, unless another version of this package made it."""
    about = case.folder.read_json(case.folder.about_file)
    made_by = about.get("versions", {}).get("underpar")
    name = case.folder.script_file.name
    if made_by != underpar.__version__:
        why = f"underpar {made_by} made {name}, this is {underpar.__version__}; pack again with it"
        return not_shown("script", f"{why}, or audit with the version of the run")
    return judge("script", False, f"{name} is not the script that 'underpar pack' writes")


def _run(case: Case, data: Path, folder: Path) -> tuple[Score, list[str]]:
    """Run the script inside `folder`: its score, and what `RUNNER` says."""
    files = (case.folder.script_file, case.folder.artifact_file, data)
    words = [str(file.resolve()) for file in files]
    # -I: no variables of Python, no user's packages, no modules of the working folder.
    command = [sys.executable, "-I", "-c", RUNNER, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last_line = (done.stderr.splitlines() or [""])[-1]
        raise RuleError(f"the script ended with code {done.returncode}: {last_line:.200}")
    score, modules = map(json.loads, done.stdout.splitlines())
    return score_from_dict(score), modules


def _write_data(case: Case, chosen: list[int], out: Path) -> None:
    """A data folder with some documents of the held-out text, and one for training."""
    data, tokenizer = case.data, case.data.tokenizer
    sidecar = case.data_path / sidecar_name("val")
    source_bytes = None
    if sidecar.is_file():
        values, shard = open_values(sidecar), data.val
        spans = [(int(shard.starts[i]), len(shard.doc(i))) for i in chosen]
        source_bytes = np.concatenate([values[start:][:length] for start, length in spans])
    with FolderWriter(out, tokenizer, max_shared=None) as writer:
        writer.add(
            "val", "val", _columns(pick_documents(data.val, chosen), tokenizer, source_bytes)
        )
        writer.add("train", "train", _columns(pick_documents(data.train, [0]), tokenizer, None))
    writer.write_manifest({})


def _columns(shard: Shard, tokenizer: Tokenizer, source_bytes: Any) -> Columns:
    by_table = tokenizer.token_bytes[shard.tokens]
    counted = np.add.reduceat(by_table, shard.starts, dtype=np.int64)
    return Columns(
        tokens=shard.tokens,
        source_bytes=by_table if source_bytes is None else source_bytes.astype(np.int32),
        counts=np.diff(shard.starts, append=shard.num_tokens),
        doc_bytes=shard.doc_bytes,
        doc_hashes=shard.doc_hashes,
        flags=shard.flags,
        num_off_table=int(np.count_nonzero(counted != shard.doc_bytes)),
    )
