"""R01: the bytes of everything that is needed to score, counted from the files on disk."""

from __future__ import annotations

from underpar.artifact.unpack import LazyArtifact
from underpar.audit.case import Case
from underpar.audit.finding import Finding, judge, not_shown


def size(case: Case) -> Finding:
    """Artifact, script and a tokenizer outside the artifact fit the cap of the auditor.

    A recipe may name a smaller cap for itself, never a larger one.
    """
    folder, cap = case.folder, min(case.limits.cap_bytes, case.recipe.limits.cap_bytes)
    script = folder.script_file
    if not script.is_file():
        return not_shown("size", f"no {script.name} beside the artifact; run 'underpar pack' again")
    files = [folder.artifact_file, script]
    if LazyArtifact(folder.artifact_file.read_bytes()).names_tokenizer:
        files.append(folder.tokenizer_file)
    sizes = {file.name: file.stat().st_size for file in files}
    total = sum(sizes.values())
    parts = " + ".join(f"{number} ({name})" for name, number in sizes.items())
    return judge(
        "size",
        total <= cap,
        f"{parts} = {total} of {cap} bytes",
        files=sizes,
        total_bytes=total,
        cap_bytes=cap,
        recipe_cap_bytes=case.recipe.limits.cap_bytes,
    )
