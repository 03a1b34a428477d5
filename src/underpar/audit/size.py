"""R01: the bytes of everything that is needed to score, counted from the files on disk."""

from __future__ import annotations

import json
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from underpar.artifact.budget import read_budget
from underpar.artifact.format import unframe, unsqueeze
from underpar.artifact.table import MAX_HEADER_BYTES
from underpar.artifact.unpack import NUM_SECTIONS, LazyArtifact
from underpar.audit.case import Case
from underpar.audit.finding import Finding, judge, not_shown
from underpar.core.makers import again

# What packing writes of a tensor and of its correction.
ROW_KEYS = {"name", "shape", "scheme", "activation", "bytes", "low", "freqs"}
ROW_KEYS |= {"correction", "rank", "left", "right", "group"}


def size(case: Case) -> Finding:
    """Artifact, script and a tokenizer outside the artifact fit the cap of the auditor.

    A recipe may name a smaller cap for itself, never a larger one. The budget that the report shows
    is counted again. Nothing else in the folder may be code: Python imports what lies beside a
    script.
    """
    folder, cap = case.folder, min(case.limits.cap_bytes, case.recipe.limits.cap_bytes)
    script = folder.script_file
    if not script.is_file():
        return not_shown("size", f"no {script.name} beside the artifact; {again(script)}")
    files = [folder.artifact_file, script]
    if LazyArtifact(folder.artifact_file.read_bytes()).names_tokenizer:
        files.append(folder.tokenizer_file)
    sizes = {file.name: file.stat().st_size for file in files}
    total = sum(sizes.values())
    data = folder.artifact_file.read_bytes()
    wrong = ["the header of the artifact holds more than its table"] if holds_more(data) else []
    wrong += [f"{file.name} is a link" for file in files if file.is_symlink()]
    wrong += [f"{name} is code that is not counted" for name in uncounted_code(folder.path, script)]
    if script.read_bytes() != case.expected_script():
        wrong.append(f"{script.name} is not the script of this artifact and its scores")
    if folder.budget_file.is_file() and not _budget_holds(case):
        wrong.append(f"{folder.budget_file.name} has other figures than the files")
    parts = " + ".join(f"{number} ({name})" for name, number in sizes.items())
    return judge(
        "size",
        total <= cap and not wrong,
        "; ".join([f"{parts} = {total} of {cap} bytes", *wrong]),
        files=sizes,
        total_bytes=total,
        cap_bytes=cap,
        recipe_cap_bytes=case.recipe.limits.cap_bytes,
        wrong=wrong,
    )


def holds_more(data: bytes) -> bool:
    """Whether the header of an artifact holds text or keys that packing does not write."""
    raw = unsqueeze(unframe(data, NUM_SECTIONS)[0], MAX_HEADER_BYTES)
    header = json.loads(raw)
    names = {*header} - {"recipe", "tensors", "tokenizer"} | _keys(header["tensors"]) - ROW_KEYS
    names |= {*header.get("tokenizer", {})} - {"sha256", "bytes"}
    return bool(names) or raw != json.dumps(header, sort_keys=True).encode()


def _keys(tree: Any) -> set[str]:
    """The keys of all objects in a tree of JSON."""
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return set(tree if isinstance(tree, dict) else ()).union(*map(_keys, parts))


def uncounted_code(folder: Path, script: Path) -> list[str]:
    """What Python could import from a folder besides the script: modules, and links to folders."""
    endings = (*all_suffixes(), ".pth", ".zip", ".egg")
    files = (file for file in folder.rglob("*") if file != script)
    code = (f for f in files if f.name.endswith(endings) or (f.is_symlink() and f.is_dir()))
    return sorted(str(file.relative_to(folder)) for file in code)


def _budget_holds(case: Case) -> bool:
    folder = case.folder
    tree = folder.read_json(folder.budget_file)
    data, code_bytes = folder.artifact_file.read_bytes(), folder.script_file.stat().st_size
    # Packing may be asked for fewer bytes than the recipe's cap.
    cap = tree.get("cap_bytes")
    if type(cap) is not int or not 0 < cap <= case.recipe.limits.cap_bytes:
        return False
    counted = read_budget(data, code_bytes, cap).as_dict()
    counted["artifact_sha256"] = case.artifact_sha256
    return {key: tree.get(key) for key in counted} == counted
