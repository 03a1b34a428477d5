"""A bundle gives its sources back, unexecuted; whatever `bundle` would not write is refused."""

import lzma
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_bundles import dump, pack

from commands import invoke, run_json
from tiny import TinyRun
from underpar.errors import ArtifactError
from underpar.recipe import load_recipe
from underpar.submit.bundle import FILTERS, as_literal, bundle, module_path, strip
from underpar.submit.unbundle import MAX_TEXT_BYTES, read_bundle, unbundle

ENTRY = "underpar.submit.entry"
names = st.from_regex(r"\Aunderpar/([a-z_]{1,8}/){0,3}[a-z0-9_]{1,8}\.(py|toml)\Z")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(names, texts, max_size=5))
def test_any_sources_come_back(sources: dict[str, str]) -> None:
    bundled = read_bundle(pack(dump(sources)))
    assert (bundled.entry, dict(bundled.sources)) == (ENTRY, sources)


def test_the_files_are_the_stripped_modules(tiny_run: TinyRun, tmp_path: Path) -> None:
    script = tmp_path / "score.py"
    script.write_bytes(bundle(tiny_run.recipe))
    result = run_json("unbundle", script, "--out", tmp_path / "out")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert result["files"] == len(files) == result["equal"] > 50
    package = module_path("underpar").parents[1]
    for path in files:
        source = package / path.relative_to(tmp_path / "out")
        assert path.read_bytes() == strip(source.read_text()).encode()
    assert "docstrings" in result["removed_by_bundling"]
    keys = {"entry", "files", "script_bytes", "source_bytes", "equal", "different"}
    assert result.keys() == keys | {"not_in_this_package", "removed_by_bundling"}


def test_a_changed_module_is_named(tmp_path: Path) -> None:
    sources = {"underpar/errors.py": "x = 1\n", "underpar/nowhere.py": "", "underpar/a.toml": ""}
    script = tmp_path / "script.py"
    script.write_bytes(pack(dump(sources)))
    result = unbundle(script, tmp_path / "out")
    assert result["different"] == ["underpar/errors.py"]
    assert result["not_in_this_package"] == ["underpar/nowhere.py"]
    assert result["equal"] == 0


@pytest.mark.parametrize(
    "name",
    [
        "../underpar/a.py",
        "/etc/a.py",
        "underpar/../../a.py",
        "underpar/./a.py",
        "underpar//a.py",
        "underpar\\a.py",
        "underpar/a.py/b.py",
        "underpar/a.pyc",
        "underpar/.a.py",
        "underpar/a.py\n",
        "underpar/a.py\0",
        "torch/a.py",
        "underpar/\u00e9.py",
        "C:/underpar/a.py",
        "",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_bytes(pack(dump({"underpar/good.py": "", name: "pass"})))
    with pytest.raises(ArtifactError, match=r"file .*expected underpar/"):
        unbundle(script, out)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_decompression_bomb_is_refused() -> None:
    bomb = pack(b'{"underpar/a.py":"' + bytes(MAX_TEXT_BYTES) + b'"}')
    assert len(bomb) < 100_000
    with pytest.raises(ArtifactError, match="over 16000000 bytes of text"):
        read_bundle(bomb)


GOOD = {"underpar/a.py": "x = 1\n"}
SCRIPT = pack(dump(GOOD))


@pytest.mark.parametrize(
    "script",
    [
        b"",
        b"print('hello')\n",
        SCRIPT + b"import os\n",
        b"import os\n" + SCRIPT,
        SCRIPT.replace(b".main()", b".main();import os"),
        SCRIPT.replace(b"sys.path.insert(0,folder)", b"sys.path.insert(1,folder)"),
        SCRIPT.replace(b"'dict_size'", b"'x'").replace(b"'lc':4", b"'lc':3"),
        SCRIPT.replace(b"'underpar.submit.entry'", b"'os.system'"),
        SCRIPT.replace(b".encode('l1')", b"\\x20'.encode('l1')"),
        SCRIPT[: len(SCRIPT) // 2],
        pack(dump([1, 2])),
        pack(dump({"underpar/a.py": 1})),
        pack(dump(GOOD) + b" "),
        pack(b'{"underpar/a.py":"1","underpar/a.py":"2"}'),
        pack(b'{"underpar/a.py":"\\ud800"}'),
        pack(b"[" * 100_000),
        pack(b"\xff\xfe"),
        bytes(16_000_001),
        zlib.compress(SCRIPT),
    ],
)
def test_what_is_no_bundle_is_refused(script: bytes) -> None:
    with pytest.raises(ArtifactError):
        read_bundle(script)


def test_cut_and_lengthened_payloads_are_refused() -> None:
    packed = lzma.compress(dump(GOOD), lzma.FORMAT_RAW, filters=FILTERS)
    for changed in (packed[:-1], packed + b"x"):
        script = SCRIPT.replace(
            as_literal(packed).encode("latin-1"), as_literal(changed).encode("latin-1")
        )
        assert script != SCRIPT
        with pytest.raises(ArtifactError):
            read_bundle(script)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_is_refused_or_named(data: st.DataObject) -> None:
    script = bytearray(REAL)
    for _ in range(data.draw(st.integers(1, 3))):
        script[data.draw(st.integers(0, len(script) - 1))] = data.draw(st.integers(0, 255))
    try:
        bundled = read_bundle(bytes(script))
    except ArtifactError:
        return
    compared = bundled.compared()
    is_named = bool(compared["different"] or compared["not_in_this_package"])
    assert is_named or bundled.entry != ENTRY or bytes(script) == REAL


# Of a recipe without levers, so that a module's change cannot hide among others.
REAL = bundle(load_recipe("baseline"))


def test_unbundle_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    script, out = tmp_path / "train_gpt.py", tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    for content, words in ((b"pass\n", "frame of a bundle"), (SCRIPT, "exists")):
        script.write_bytes(content)
        with pytest.raises(ArtifactError, match=words) as error:
            invoke("unbundle", script, "--out", out)
        assert "\n" not in str(error.value)
    with pytest.raises(ArtifactError, match="cannot read"):
        unbundle(tmp_path / "none.py", tmp_path / "new")
    assert (out / "mine.txt").read_text() == "kept"
