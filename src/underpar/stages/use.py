"""Use an artifact: compress, decompress."""

from __future__ import annotations

import lzma
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from underpar.build.adaptation import open_adaptation
from underpar.build.artifact import build_tokenizer, read_artifact
from underpar.build.exact import build_exact_predictor
from underpar.build.model import build_predictor
from underpar.codec.exact import DECODER_BYTES
from underpar.codec.frame import MODE_NAMES, read_frame
from underpar.codec.stream import Codec
from underpar.core.progress import SILENT, Progress, Task
from underpar.core.run_folder import write_atomic
from underpar.core.runtime import Runtime
from underpar.core.words import speed_text
from underpar.data.folder import load_data
from underpar.errors import CodecError, UnderparError

# In place of a path: standard input or output.
PIPE = Path("-")
# Between the documents of a data folder.
ZERO = b"\0"


def open_codec(artifact_path: Path, runtime: Runtime) -> Codec:
    """The codec of an artifact file; its predictor also scores and generates."""
    artifact, identity = read_artifact(artifact_path)
    predictor, tokenizer = build_predictor(artifact, runtime.device), build_tokenizer(artifact)
    return Codec(
        predictor,
        tokenizer,
        identity,
        lambda: open_adaptation(artifact, runtime),
        cache(lambda: build_exact_predictor(artifact, runtime.device)),
    )


def read_input(path: Path) -> bytes:
    """The bytes of a user's file, or of standard input."""
    if path == PIPE:
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnderparError(f"cannot read {path}: {error.strerror}") from error


def write_output(path: Path, data: bytes) -> None:
    """A file whole or not at all, or standard output."""
    if path == PIPE:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write_atomic(path, data)


def separator_of(text: str) -> bytes:
    """The bytes of a separator as it is typed, with the escapes of Python."""
    try:
        return text.encode().decode("unicode_escape").encode("latin-1")
    except UnicodeError as error:
        raise CodecError(f"separator {text!r:.80}: not text with escapes as in '\\n'") from error


def read_held_out(folder: Path) -> bytes:
    """The held-out documents of a data folder, with a zero byte between two."""
    data = load_data(folder)
    shard = data.val
    texts = [data.tokenizer.decode(shard.doc(i)[1:]) for i in range(shard.num_documents)]
    if any(ZERO in text for text in texts):
        raise CodecError(f"{folder}: a document holds a zero byte, so that none can stand between")
    return ZERO.join(texts)


def compress(
    artifact: Path,
    source: Path,
    out: Path,
    runtime: Runtime,
    progress: Progress = SILENT,
    *,
    adapt: bool = False,
    exact: bool = False,
    decoder_gb: float = DECODER_BYTES / 1e9,
    separator: bytes = b"",
    indexed: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Compress a file, or the held-out documents of a data folder; returns sizes.

    The result is decoded as a check before anything is written, unless `verify` is false.
    """
    if not decoder_gb > 0:
        raise CodecError(f"--decoder-memory {decoder_gb:g}: expected more than 0 GB")
    if source.is_dir():
        data, separator = read_held_out(source), separator or ZERO
    else:
        data = read_input(source)
    codec = open_codec(artifact, runtime)
    with progress.task("compress", len(data)) as task:
        compressed = codec.compress(
            data,
            _meter(task, len(data), "then decoding again" if verify else ""),
            adapt=adapt,
            exact=exact,
            decoder_bytes=1e9 * decoder_gb,
            separator=separator,
            indexed=indexed,
            verify=verify,
        )
    write_output(out, compressed)
    frame = read_frame(compressed)
    return {
        "raw_bytes": len(data),
        "compressed_bytes": len(compressed),
        "header_bytes": len(compressed) - len(frame.payload) - len(frame.index),
        "index_bytes": len(frame.index),
        "bits_per_byte": 8 * len(compressed) / max(1, len(data)),
        "mode": MODE_NAMES[frame.header.mode],
        "documents": frame.header.num_documents,
        "lanes": frame.header.num_lanes,
        "decoder_bytes": codec.decoder_bytes(frame),
        "verified": frame.verified,
        "xz_bytes": len(lzma.compress(data, preset=9)),
        "with_artifact_bytes": len(compressed) + artifact.stat().st_size,
    }


def decompress(
    artifact: Path,
    source: Path,
    out: Path,
    runtime: Runtime,
    any_machine: bool = False,
    progress: Progress = SILENT,
    document: int | None = None,
) -> dict[str, Any]:
    """Give back the file that `compress` read, or one document of it; returns sizes."""
    compressed = read_input(source)
    total = read_frame(compressed).header.num_bytes
    codec = open_codec(artifact, runtime)
    with progress.task("decompress", total) as task:
        data = codec.decompress(compressed, any_machine, _meter(task, total), document)
    write_output(out, data)
    return {"compressed_bytes": len(compressed), "raw_bytes": len(data)}


def _meter(task: Task, num_bytes: int, remark: str = "") -> Callable[[float], None]:
    """Shows bytes done and their speed."""
    begin = time.monotonic()

    def show(share: float) -> None:
        done = share * num_bytes
        speed = speed_text(done / max(1e-9, time.monotonic() - begin))
        task.update(done, f"{speed}, {remark}" if remark else speed)

    return show
