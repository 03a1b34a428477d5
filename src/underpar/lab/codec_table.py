"""An artifact as a compressor beside xz, bzip2, zstd, brotli, PPMd and zpaq, on the same texts.

Every compressor codes each text as one file, with a strong setting and one thread, and what it
decodes must equal the text. Those that are not installed are named and left out. The other
compressors need only their program; a model is also counted with the bytes of its artifact. OUT
gets codec.json, codec.md and codec.svg.
"""

from __future__ import annotations

import bz2
import hashlib
import lzma
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from underpar.codec.stream import Codec
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import write_atomic, write_json
from underpar.core.runtime import Runtime
from underpar.core.versions import device_name, processor_name, versions
from underpar.core.words import bytes_text, change_text, count_text, number_text
from underpar.errors import BenchError, UnderparError
from underpar.report import charts
from underpar.report.charts import Labels, Line
from underpar.report.drawing import HEIGHT, stack_panels
from underpar.report.facts import break_even
from underpar.stages.use import open_codec, read_input

Code = Callable[[bytes], bytes]

# The modes of compressed files, and what asks for them. The comparison itself decodes.
MODES: dict[str, dict[str, Any]] = {
    "model": {},
    "model, adapting": {"adapt": True},
    "model, exact": {"exact": True},
}
# Short calls are repeated for so long, or so often; the time is the median.
TIMED_SECONDS, MOST_CALLS = 0.2, 100
# What PPMd may use for its contexts: more than any text of some megabytes needs.
PPMD_MEMORY_BYTES = 1 << 28


@dataclass(frozen=True)
class Coder:
    """A compressor: its name, both directions, bytes that a decoder needs beside its program."""

    name: str
    compress: Code
    decompress: Code
    model_bytes: int = 0


@dataclass(frozen=True)
class Row:
    """One compressor on one text."""

    name: str
    compressed_bytes: int
    with_artifact_bytes: int
    bits_per_byte: float
    compress_seconds: float
    decompress_seconds: float


def measure(
    artifact: Path, paths: Sequence[Path], runtime: Runtime, progress: Progress = SILENT
) -> dict[str, Any]:
    """Files of an artifact and of other compressors: sizes, speeds, where the artifact pays."""
    texts = [(path.stem, read_input(path)) for path in paths]
    for path, (_, data) in zip(paths, texts, strict=True):
        if not data:
            raise BenchError(f"{path} is empty: there is nothing to compress")
    codec = open_codec(artifact, runtime)
    others, missing = installed()
    artifact_bytes = artifact.stat().st_size
    models, refused = model_coders(codec, artifact_bytes)
    coders = [*models, *others]
    results: list[dict[str, Any]] = []
    with progress.task("codecs", len(texts) * len(coders)) as task:
        for name, data in texts:
            rows: list[Row] = []
            for coder in coders:
                task.update(len(results) * len(coders) + len(rows), f"{coder.name} on {name}")
                rows.append(measure_coder(coder, data, name))
            results.append(about_text(name, data, rows, artifact_bytes))
    return {
        "artifact": str(artifact),
        "artifact_sha256": codec.identity,
        "artifact_bytes": artifact_bytes,
        "left_out": refused | missing,
        "texts": results,
        "device": device_name(runtime.device),
        "processor": processor_name(),
        "versions": versions() | versions("zstandard", "brotli", "pyppmd", "zpaq"),
    }


def model_coders(codec: Codec, artifact_bytes: int) -> tuple[list[Coder], dict[str, str]]:
    """A compressor per mode of the artifact's files, and name -> reason for modes it has not."""
    coders, refused = [], {}
    for name, options in MODES.items():
        compress: Code = partial(codec.compress, verify=False, **options)
        try:
            compress(b"a")
        except UnderparError as error:
            refused[name] = str(error)
        else:
            coders.append(Coder(name, compress, codec.decompress, artifact_bytes))
    return coders, refused


def measure_coder(coder: Coder, data: bytes, text: str) -> Row:
    """Sizes and times of one compressor; a wrong round trip is an error."""
    compressed, compress_seconds = timed(coder.compress, data)
    decoded, decompress_seconds = timed(coder.decompress, compressed)
    if decoded != data:
        raise BenchError(f"{coder.name} on {text}: what it decodes is not the text")
    size = len(compressed)
    return Row(
        name=coder.name,
        compressed_bytes=size,
        with_artifact_bytes=size + coder.model_bytes,
        bits_per_byte=8 * size / len(data),
        compress_seconds=compress_seconds,
        decompress_seconds=decompress_seconds,
    )


def timed(code: Code, data: bytes) -> tuple[bytes, float]:
    """The result of a call, and the median of its seconds."""
    seconds: list[float] = []
    began = time.perf_counter()
    while True:
        started = time.perf_counter()
        result = code(data)
        ended = time.perf_counter()
        seconds.append(ended - started)
        if ended - began >= TIMED_SECONDS or len(seconds) == MOST_CALLS:
            return result, median(seconds)


def about_text(name: str, data: bytes, rows: Sequence[Row], artifact_bytes: int) -> dict[str, Any]:
    """The rows of a text, the best of either kind, and where the artifact pays."""
    model = min((row for row in rows if row.name in MODES), key=lambda row: row.compressed_bytes)
    others = [row for row in rows if row.name not in MODES]
    best = min(others, key=lambda row: row.compressed_bytes)
    return {
        "name": name,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "rows": [asdict(row) for row in rows],
        "best_model": model.name,
        "best_other": best.name,
        "ratio_to_best_other": model.compressed_bytes / best.compressed_bytes,
        "break_even_bytes": break_even(
            len(data), 8 * model.compressed_bytes, best.compressed_bytes, artifact_bytes
        ),
    }


def installed() -> tuple[list[Coder], dict[str, str]]:
    """The compressors of this machine, and name -> how to install it for all others."""
    coders, missing = [], {}
    for name, (find, hint) in OTHERS.items():
        try:
            coders.append(find())
        except ImportError:
            missing[name] = hint
    return coders, missing


def _xz() -> Coder:
    extreme = 9 | lzma.PRESET_EXTREME
    return Coder("xz -9e", lambda data: lzma.compress(data, preset=extreme), lzma.decompress)


def _bzip2() -> Coder:
    return Coder("bzip2 -9", bz2.compress, bz2.decompress)


def _zstd() -> Coder:
    import zstandard

    return Coder(
        "zstd -22",
        lambda data: zstandard.ZstdCompressor(level=22).compress(data),
        lambda data: zstandard.ZstdDecompressor().decompress(data),
    )


def _brotli() -> Coder:
    import brotli

    return Coder(
        "brotli -q 11",
        lambda data: bytes(brotli.compress(data, quality=11, lgwin=24)),
        lambda data: bytes(brotli.decompress(data)),
    )


def _ppmd() -> Coder:
    """PPMd variant I of Shkarin; order 8 was the best of 4 to 16 on news and novels."""
    import pyppmd

    settings: Mapping[str, Any] = {"max_order": 8, "mem_size": PPMD_MEMORY_BYTES, "variant": "I"}
    return Coder(
        "PPMd -o 8",
        lambda data: bytes(pyppmd.compress(data, **settings)),
        lambda data: bytes(pyppmd.decompress(data, **settings)),
    )


def _zpaq() -> Coder:
    """The package of that name, or else the program."""
    name = "zpaq -m5"
    try:
        import zpaq
    except ImportError:
        program = shutil.which("zpaq")
        if program is None:
            raise
        archiver = ZpaqProgram(program)
        return Coder(name, archiver.compress, archiver.decompress)
    # One thread: with more, the text is cut into blocks that do not share their statistics.
    return Coder(
        name,
        lambda data: bytes(zpaq.compress(data, level=5, threads=1)),
        lambda data: bytes(zpaq.decompress(data, threads=1)),
    )


@dataclass(frozen=True)
class ZpaqProgram:
    """The archiver zpaq, which reads and writes files: an archive with a single one in it."""

    program: str

    def compress(self, data: bytes) -> bytes:
        """`data` as an archive."""
        return self._run({"text": data}, "add", "text.zpaq", "text", "-method", "5")["text.zpaq"]

    def decompress(self, data: bytes) -> bytes:
        """The file in an archive."""
        return self._run({"text.zpaq": data}, "extract", "text.zpaq")["text"]

    def _run(self, files: Mapping[str, bytes], *words: str) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, content in files.items():
                (folder / file).write_bytes(content)
            words = (self.program, *words, "-threads", "1")
            done = subprocess.run(words, cwd=folder, capture_output=True)
            if done.returncode:
                last = (done.stderr.decode(errors="replace").strip() or "no message").splitlines()
                raise BenchError(f"{self.program}: exit code {done.returncode}, {last[-1]}")
            return {file.name: file.read_bytes() for file in folder.iterdir()}


# Name -> how to open it, and how to install it.
OTHERS: dict[str, tuple[Callable[[], Coder], str]] = {
    "xz": (_xz, "part of Python"),
    "bzip2": (_bzip2, "part of Python"),
    "zstd": (_zstd, "pip install zstandard"),
    "brotli": (_brotli, "pip install brotli"),
    "PPMd": (_ppmd, "pip install pyppmd"),
    "zpaq": (_zpaq, "pip install zpaq, or put the program zpaq on the PATH"),
}

COLUMNS = (
    "compressor",
    "bytes#",
    "bits per byte#",
    "with artifact#",
    "compress MB/s#",
    "decompress MB/s#",
)


def cells_of(text: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a text's table, the smallest file first."""
    cells = []
    for row in sorted(text["rows"], key=lambda row: row["compressed_bytes"]):
        sizes = (
            f"{row['compressed_bytes']:,}",
            number_text(row["bits_per_byte"]),
            f"{row['with_artifact_bytes']:,}",
        )
        rates = (
            _rate_text(text["bytes"], row[f"{way}_seconds"]) for way in ("compress", "decompress")
        )
        cells.append((row["name"], *sizes, *rates))
    return cells


def _rate_text(num_bytes: int, seconds: float) -> str:
    """Megabytes per second; compressors differ by a factor of a million."""
    rate = num_bytes / 1e6 / seconds
    return number_text(rate, 4 if rate < 0.1 else 2 if rate < 100 else 0)


def sentence_of(record: Mapping[str, Any]) -> str:
    """On how many texts the model's file is the smallest."""
    texts = record["texts"]
    won = sum(text["ratio_to_best_other"] < 1 for text in texts)
    return f"The model's file is the smallest on {won} of {count_text(len(texts), 'text')}."


def rows_of(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values in words: a verdict per text, the artifact, what is missing here."""
    rows = [(text["name"], verdict_of(text)) for text in record["texts"]]
    rows.append(("artifact", bytes_text(record["artifact_bytes"])))
    rows += [(f"without {name}", why) for name, why in record["left_out"].items()]
    return rows


def verdict_of(text: Mapping[str, Any]) -> str:
    """A text in words: how much smaller than the best of the others, and where that pays."""
    words = f"{text['best_model']}: {change_text(text['ratio_to_best_other'])} than"
    words += f" {text['best_other']}"
    length = text["break_even_bytes"]
    if length is None:
        return f"{words}, the best of the others"
    return f"{words}, the best of the others; artifact included, from {bytes_text(length)} on"


def to_markdown(record: Mapping[str, Any]) -> str:
    """The sentence, then a table per text."""
    lines = [sentence_of(record), "", f"The artifact has {record['artifact_bytes']:,} bytes."]
    for text in record["texts"]:
        lines += ["", f"{text['name']}, {text['bytes']:,} bytes: {verdict_of(text)}.", ""]
        lines.append(f"| {' | '.join(column.rstrip('#') for column in COLUMNS)} |")
        rules = ("---:" if column.endswith("#") else "---" for column in COLUMNS)
        lines.append(f"|{'|'.join(rules)}|")
        lines += [f"| {' | '.join(cells)} |" for cells in cells_of(text)]
    lines += ["", f"Measured on {record['processor']}, {record['device']}."]
    lines += [f"Left out: {name} ({why})." for name, why in record["left_out"].items()]
    return "\n".join(lines) + "\n"


def write_results(record: Mapping[str, Any], out: Path) -> None:
    """Write the record, the tables and the plot into the folder `out`."""
    plot = draw_plot(record)
    write_json(out / "codec.json", record)
    write_atomic(out / "codec.md", to_markdown(record))
    write_atomic(out / "codec.svg", plot)


def draw_plot(record: Mapping[str, Any]) -> str:
    """Bytes of files over the length of a text as an SVG, a panel per text.

    A model's line begins at the bytes of its artifact. The rates are those that were measured,
    whatever the length; the panel ends at twice the break-even length. Only the best of the others
    are drawn, as there are few colors.
    """
    texts = record["texts"]
    sizes = {row["name"]: 0 for row in texts[0]["rows"]}
    for row in (row for text in texts for row in text["rows"]):
        sizes[row["name"]] += row["compressed_bytes"]
    # Models first, then the others by the bytes of their files.
    names = sorted(sizes, key=lambda name: (name not in MODES, sizes[name]))[: charts.NUM_COLORS]
    panels = []
    for text in texts:
        end = 2.0 * (text["break_even_bytes"] or record["artifact_bytes"])
        rates = {row["name"]: row["bits_per_byte"] / 8 for row in text["rows"]}
        lines = []
        for color, name in enumerate(names):
            start = float(record["artifact_bytes"]) if name in MODES else 0.0
            lines.append(Line([(0.0, start), (end, start + end * rates[name])], color))
        labels = Labels(f"bytes of {text['name']}", "bytes of the file, with the artifact")
        panels.append(charts.line_chart(lines, labels, height=HEIGHT))
    return stack_panels(panels, names)
