"""Tokenize past one machine: datatrove ranks write a data folder each, and one merge joins them.

python examples/datatrove_step.py INPUTS TOKENIZER OUT TASKS WORKERS, again to go on after a stop;
then underpar data merge OUT/[0-9]* --out DATA. Slurm and Ray executors take the same pipeline.
"""

import sys
from functools import partial
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers.base import BaseDiskReader

from underpar.data.build import BuildOptions
from underpar.data.merge import write_part
from underpar.data.sources.corpus import read_documents


# Datatrove's own readers skip what they cannot parse; this one refuses it.
class Read(BaseDiskReader):
    def read_file(self, filepath):
        for i, doc in enumerate(read_documents([Path(self.data_folder.resolve_paths(filepath))])):
            yield self.get_document_from_dict({"text": doc.text}, filepath, i)


def tokenize(data, rank, world_size, out, options):
    """Write the documents of a rank; filters may stand before this step."""
    texts = ((doc.metadata["file_path"], doc.text) for doc in data)
    # A rank that was stopped before it was recorded as finished writes its folder again.
    write_part(texts, out / f"{rank:05d}", options, overwrite=True)


def main(inputs, tokenizer, out, tasks, workers):
    options = BuildOptions(None, holdout=0.1, tokenizer=tokenizer, transform="identity")
    steps = [Read(str(inputs)), partial(tokenize, out=out, options=options)]
    LocalPipelineExecutor(steps, tasks, workers, logging_dir=str(out / "logs")).run()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:6]))
