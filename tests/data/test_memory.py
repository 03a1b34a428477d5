"""Building data takes the same memory for a gigabyte as for a tenth of it."""

import json
import random
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from underpar.data.sources.corpus import demo_corpus, read_documents
from underpar.data.tokens.train_bpe import train_tokenizer

BUILD = """
import sys
from pathlib import Path
from underpar.data.build import BuildOptions, build_data

if __name__ == "__main__":
    source, tokenizer, out = map(Path, sys.argv[1:])
    options = BuildOptions(None, 0.01, tokenizer, transform="caseops_before", workers=1)
    build_data([source], out, options, overwrite=True)
    # Not getrusage: its maximum goes back to before the program was started.
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


def endless_texts() -> Iterator[str]:
    """Real words, and new ones that no table has seen, for ever."""
    rng = random.Random(0)
    words = " ".join(document.text for document in read_documents([demo_corpus()])).split(" ")
    while True:
        text = rng.choices(words, k=500)
        text[::20] = ("".join(rng.choices(string.ascii_letters, k=8)) for _ in text[::20])
        yield " ".join(text)


def peak_kilobytes(folder: Path, num_bytes: int) -> int:
    """Most memory of one process that builds; every further worker holds as much again."""
    source, script = folder / f"{num_bytes}.jsonl", folder / "build.py"
    texts, written = endless_texts(), 0
    with source.open("w") as file:
        while written < num_bytes:
            written += file.write(json.dumps({"text": next(texts)}) + "\n")
    script.write_text(BUILD)
    command = [sys.executable, script, source, folder / "tokenizer.model", folder / "out"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    source.unlink()
    return int(done.stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_stream(tmp_path: Path) -> None:
    texts = endless_texts()
    model = train_tokenizer([next(texts) for _ in range(500)], 2048, "caseops_before")
    (tmp_path / "tokenizer.model").write_bytes(model)
    # The peak moves by a few per cent from run to run, whatever the length: the allocator's doing.
    small = max(peak_kilobytes(tmp_path, 10**8) for _ in range(3))
    large = peak_kilobytes(tmp_path, 10**9)
    print(f"peak kilobytes: 100 MB {small}, 1 GB {large}")
    assert large <= 1.05 * small
    assert large < 2_000_000
