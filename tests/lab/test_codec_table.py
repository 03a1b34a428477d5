"""The comparison of compressors: round trips, figures by hand, what is not installed, the files."""

import json
import lzma
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import invoke, run, run_json
from tiny import TinyRun
from underpar.errors import BenchError
from underpar.lab import codec_table
from underpar.lab.codec_table import MODES, Coder, Row, about_text, installed, measure_coder

NEWS = b"The minister said on Monday that the vote had been moved to the end of the week. " * 3
CODE = b"def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n" * 3
# Stands for the program: `add ARCHIVE FILE`, `extract ARCHIVE`.
ZPAQ = """#!{python}
import lzma, sys
if sys.argv[1] == "add":
    open(sys.argv[2], "wb").write(lzma.compress(open(sys.argv[3], "rb").read()))
elif b"bad" in open(sys.argv[2], "rb").read():
    sys.exit("the archive is damaged")
else:
    open("text", "wb").write(lzma.decompress(open(sys.argv[2], "rb").read()))
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    for name, data in (("news.txt", NEWS), ("code.py", CODE)):
        (folder / name).write_bytes(data)
    return [folder / "news.txt", folder / "code.py"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codec")


@pytest.fixture(scope="module")
def record(tiny_run: TinyRun, texts: list[Path], out: Path) -> dict[str, Any]:
    words = ("bench", "codec", tiny_run.folder.path, *texts, "--out", out, "--device", "cpu")
    return run_json(*words)


def test_every_compressor_here_gives_every_text_back() -> None:
    coders, missing = installed()
    assert len(coders) + len(missing) == 6
    for data in (b"x", NEWS, CODE, bytes(range(256)) * 9):
        for coder in coders:
            assert coder.decompress(coder.compress(data)) == data, coder.name


def test_figures_of_a_record(record: dict[str, Any], tiny_run: TinyRun) -> None:
    artifact_bytes = tiny_run.folder.artifact_file.stat().st_size
    assert record["artifact_bytes"] == artifact_bytes
    assert [(text["name"], text["bytes"]) for text in record["texts"]] == [
        ("news", len(NEWS)),
        ("code", len(CODE)),
    ]
    for text, data in zip(record["texts"], (NEWS, CODE), strict=True):
        sizes = {row["name"]: row["compressed_bytes"] for row in text["rows"]}
        assert sizes["xz -9e"] == len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
        best = min(size for name, size in sizes.items() if name not in MODES)
        model = min(size for name, size in sizes.items() if name in MODES)
        assert (sizes[text["best_model"]], sizes[text["best_other"]]) == (model, best)
        assert text["ratio_to_best_other"] == model / best
        for row in text["rows"]:
            more = artifact_bytes if row["name"] in MODES else 0
            assert row["with_artifact_bytes"] == row["compressed_bytes"] + more
            assert row["bits_per_byte"] == 8 * row["compressed_bytes"] / len(data)
            assert row["compress_seconds"] > 0
            assert row["decompress_seconds"] > 0


def test_modes_that_an_artifact_has_not_are_named(record: dict[str, Any]) -> None:
    # The tiny recipe adapts by scales, which no file can be coded with.
    assert "lora_ttt" in record["left_out"]["model, adapting"]
    names = {row["name"] for text in record["texts"] for row in text["rows"]}
    assert "model" in names and names | record["left_out"].keys() >= MODES.keys()
    assert not names & record["left_out"].keys()


def test_files_of_a_comparison(record: dict[str, Any], out: Path) -> None:
    assert json.loads((out / "codec.json").read_text()) == record
    page = (out / "codec.md").read_text()
    plot = (out / "codec.svg").read_text()
    assert plot == codec_table.draw_plot(record)
    for text in record["texts"]:
        assert f"{text['name']}, {text['bytes']:,} bytes" in page
        assert text["name"] in plot
        for row in text["rows"]:
            assert f"| {row['name']} | {row['compressed_bytes']:,} |" in page


def test_the_plot_shows_the_model_and_the_best_of_the_others() -> None:
    record = made_up(200, 900, 400, 300, 700, 600, 500, 800)
    assert record["texts"][0]["break_even_bytes"] == 5001
    plot = codec_table.draw_plot(record)
    assert [f">{name}</text>" in plot for name in ("model", "other 300", "other 700")] == [True] * 3
    assert "other 800" not in plot
    # The panel ends at twice the break-even length: both lines meet in its middle.
    assert ">10,000</text>" in plot
    ends = re.findall(r'points="0.0,([\d.]+) 1000.0,([\d.]+)" class="bold (?:c0|c1)"', plot)
    [model, other] = [(float(left) + float(right)) / 2 for left, right in ends]
    assert abs(model - other) < 0.2


def row(name: str, compressed_bytes: int, num_bytes: int = 1000) -> Row:
    more = 500 if name in MODES else 0
    rate = 8 * compressed_bytes / num_bytes
    return Row(name, compressed_bytes, compressed_bytes + more, rate, 0.5, 0.25)


def made_up(model: int, *others: int) -> dict[str, Any]:
    """A record of a text of 1,000 bytes and an artifact of 500."""
    rows = [row(f"other {size}", size) for size in others]
    text = about_text("news", bytes(1000), [*rows, row("model", model)], 500)
    return {
        "artifact_bytes": 500,
        "texts": [text],
        "left_out": {},
        "processor": "a processor",
        "device": "cpu",
    }


def test_the_artifact_pays_from_a_length_on() -> None:
    # 0.2 bytes per byte against 0.3: 0.1 saved per byte, 500 bytes after 5,000.
    record = made_up(200, 400, 300)
    [text] = record["texts"]
    assert (text["best_other"], text["break_even_bytes"]) == ("other 300", 5001)
    assert codec_table.sentence_of(record) == "The model's file is the smallest on 1 of 1 text."
    assert codec_table.verdict_of(text) == (
        "model: 33.3 % smaller than other 300, the best of the others; artifact included, "
        "from 5,001 bytes on"
    )
    assert codec_table.cells_of(text) == [
        ("model", "200", "1.6000", "700", "0.0020", "0.0040"),
        ("other 300", "300", "2.4000", "300", "0.0020", "0.0040"),
        ("other 400", "400", "3.2000", "400", "0.0020", "0.0040"),
    ]


def test_a_model_that_never_pays() -> None:
    record = made_up(330, 300)
    [text] = record["texts"]
    assert text["break_even_bytes"] is None
    assert codec_table.sentence_of(record) == "The model's file is the smallest on 0 of 1 text."
    assert codec_table.verdict_of(text) == (
        "model: 10.0 % larger than other 300, the best of the others"
    )


def test_a_wrong_round_trip_is_an_error() -> None:
    broken = Coder("broken", lambda data: data[1:], lambda data: data)
    with pytest.raises(BenchError, match="broken on news: what it decodes is not the text"):
        measure_coder(broken, NEWS, "news")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("zstandard", "brotli", "pyppmd", "zpaq"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    coders, missing = installed()
    assert [coder.name for coder in coders] == ["xz -9e", "bzip2 -9"]
    assert missing["zstd"] == "pip install zstandard"
    assert list(missing) == ["zstd", "brotli", "PPMd", "zpaq"]
    record = made_up(200, 300) | {"left_out": missing}
    assert "Left out: PPMd (pip install pyppmd)." in codec_table.to_markdown(record)


def test_zpaq_as_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "zpaq"
    program.write_text(ZPAQ.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setitem(sys.modules, "zpaq", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    [zpaq] = [coder for coder in installed()[0] if coder.name == "zpaq -m5"]
    assert lzma.decompress(zpaq.compress(NEWS)) == NEWS
    assert zpaq.decompress(zpaq.compress(NEWS)) == NEWS
    with pytest.raises(BenchError, match="exit code 1, the archive is damaged"):
        zpaq.decompress(b"bad")


def test_the_command_says_it_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tiny_run: TinyRun, texts: list[Path]
) -> None:
    monkeypatch.setattr(codec_table, "installed", lambda: ([codec_table.OTHERS["xz"][0]()], {}))
    # In words, because lines break where the terminal ends.
    printed = " ".join(
        run("bench", "codec", tiny_run.folder.path, texts[0], "--device", "cpu").split()
    )
    assert printed.startswith("The model's file is the smallest on ")
    assert "than xz -9e, the best of the others" in printed
    assert f"news, {len(NEWS)} bytes" in printed
    assert "MB/s" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["codec"], "underpar bench codec ARTIFACT TEXT"),
        (["codec", "model.upar"], "underpar bench codec ARTIFACT TEXT"),
        (["codec", "model.upar", "x", "--set", "train.seed=1"], "'codec' takes no overrides"),
        (["codecs"], "'codec'"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        invoke("bench", *words)


def test_an_empty_text_is_refused_before_anything_is_measured(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(BenchError, match=r"empty\.txt is empty"):
        invoke("bench", "codec", tiny_run.folder.path, tmp_path / "empty.txt")
