"""Use an artifact: compress, decompress."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

from underpar.build.artifact import build_tokenizer, read_artifact
from underpar.build.model import build_predictor
from underpar.codec.frame import read_frame
from underpar.codec.stream import Codec
from underpar.core.progress import SILENT, Progress
from underpar.core.run_folder import write_atomic
from underpar.core.runtime import Runtime
from underpar.errors import UnderparError


def open_codec(artifact_path: Path, runtime: Runtime) -> Codec:
    """The codec of an artifact file; its predictor also scores and generates."""
    artifact, identity = read_artifact(artifact_path)
    return Codec(build_predictor(artifact, runtime.device), build_tokenizer(artifact), identity)


def read_input(path: Path) -> bytes:
    """The bytes of a user's file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnderparError(f"cannot read {path}: {error.strerror}") from error


def compress(
    artifact: Path, source: Path, out: Path, runtime: Runtime, progress: Progress = SILENT
) -> dict[str, Any]:
    """Compress a file and check the result by decoding it; returns sizes."""
    data = read_input(source)
    codec = open_codec(artifact, runtime)
    total = max(1, len(codec.tokenizer.encode(data)))
    done = 0
    with progress.task("compress", total) as task:

        def show(num_tokens: int) -> None:
            nonlocal done
            done += num_tokens
            task.update(done, "then decoding again" if done >= total else "")

        compressed = codec.compress(data, show)
    write_atomic(out, compressed)
    payload = read_frame(compressed).payload
    return {
        "raw_bytes": len(data),
        "compressed_bytes": len(compressed),
        "header_bytes": len(compressed) - len(payload),
        "bits_per_byte": 8 * len(compressed) / max(1, len(data)),
        "xz_bytes": len(lzma.compress(data, preset=9)),
        "with_artifact_bytes": len(compressed) + artifact.stat().st_size,
    }


def decompress(
    artifact: Path, source: Path, out: Path, runtime: Runtime, any_machine: bool = False
) -> dict[str, Any]:
    """Give back the file that `compress` read; returns sizes."""
    compressed = read_input(source)
    data = open_codec(artifact, runtime).decompress(compressed, any_machine)
    write_atomic(out, data)
    return {"compressed_bytes": len(compressed), "raw_bytes": len(data)}
