"""What people and tools expect of a Python project: one version, whole archives, checked tools."""

import re
import tomllib
from pathlib import Path

import underpar

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What a source archive may leave out: settings of services, and of git.
LEFT_OUT = {".ci", ".dockerignore", ".gitattributes", ".github", ".gitignore", ".git"}
LEFT_OUT |= {".pre-commit-config.yaml"}
# What setuptools takes without being told.
ALWAYS_IN = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}


def _included(manifest: str) -> set[str]:
    lines = re.findall(r"^(?:include|graft) (.+)$", manifest, re.MULTILINE)
    return {name for line in lines for name in line.split()}


def _ignored() -> set[str]:
    lines = (ROOT / ".gitignore").read_text().splitlines()
    return {line.strip("/") for line in lines if not line.startswith("!")}


def test_the_version_is_written_once_and_cited() -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f'version: "{underpar.__version__}"' in citation
    assert f"license: {PROJECT['license']}" in citation


def test_a_source_archive_holds_every_file_of_the_repository() -> None:
    included = _included((ROOT / "MANIFEST.in").read_text())
    missing = sorted(name for name in included if not (ROOT / name).exists())
    assert missing == []
    caches = {name for name in _ignored() if "*" not in name}
    here = {path.name for path in ROOT.iterdir() if not path.name.endswith(".egg-info")}
    assert sorted(here - caches - LEFT_OUT - ALWAYS_IN - included) == []


def test_the_tested_pythons_are_the_stated_ones() -> None:
    stated = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c}
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    matrix = re.search(r"python: \[(.+)\]", workflow)
    assert matrix and set(re.findall(r'"([\d.]+)"', matrix[1])) == stated
    assert PROJECT["requires-python"] == f">={min(stated)}"


def test_services_call_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    called = set(re.findall(r"run: make ([\w-]+)", workflow))
    assert {"test", "lint", "demo"} <= called <= targets
    # A RUN line of the Dockerfile makes the environment of the README's commands.
    assert "make .venv/.ready" in (ROOT / "Dockerfile").read_text()
    assert "make demo" in (ROOT / "README.md").read_text()
