"""Send the figures of a run to a tracker: trackio, wandb or mlflow, while it trains or afterwards.

    pip install trackio
    python examples/track.py runs/mine --to trackio
    python examples/track.py runs/mine --to wandb --project golf --follow

`underpar train` writes metrics.jsonl and TensorBoard files itself and knows no tracker. This page
reads the file: what a tracker does, or a server that is away, cannot stop a training run.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from underpar.core.run_folder import RunFolder
from underpar.recipe import to_tree

# Called with the figures of a step, and the step.
Log = Callable[[dict[str, float], int], None]


def settings_of(run: RunFolder) -> dict[str, Any]:
    """The recipe as flat names and values: "train.matrix_lr" -> 0.02."""
    tree = to_tree(run.read_recipe(), complete=True)
    return {f"{part}.{key}": v for part, table in tree.items() for key, v in table.items()}


def open_tracker(tool: str, project: str, run: RunFolder) -> tuple[Log, Callable[[], None]]:
    """How a tracker takes figures, and how it is closed."""
    module = import_module(tool)
    if tool == "mlflow":
        module.set_experiment(project)
        module.start_run(run_name=run.path.name)
        # Values are kept as text; long ones are refused.
        module.log_params({name: str(v)[:500] for name, v in settings_of(run).items()})
        return (lambda figures, step: module.log_metrics(figures, step=step)), module.end_run
    # trackio has the interface of wandb.
    opened = module.init(project=project, name=run.path.name, config=settings_of(run))
    return (lambda figures, step: opened.log(figures, step=step)), opened.finish


def steps_of(run: RunFolder, follow: bool, wait: float = 5.0) -> Iterator[dict[str, Any]]:
    """The logged steps, each once; with `follow`, those to come until the run has its weights."""
    num_sent = 0
    while True:
        # Asked first: lines that come after the answer are read in the next round.
        is_over = not follow or run.weights_file.exists()
        lines = list(run.metrics())
        yield from lines[num_sent:]
        num_sent = len(lines)
        if is_over:
            return
        time.sleep(wait)


def track(run: RunFolder, tool: str, project: str, follow: bool = False) -> int:
    """Send a run; returns the number of steps sent."""
    log, close = open_tracker(tool, project, run)
    num_sent = 0
    for line in steps_of(run, follow):
        log({name: float(value) for name, value in line.items()}, int(line["step"]))
        num_sent += 1
    close()
    return num_sent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", choices=("trackio", "wandb", "mlflow"), required=True)
    parser.add_argument("--project", default="underpar")
    parser.add_argument("--follow", action="store_true", help="until the run is finished")
    asked = parser.parse_args()
    print(track(RunFolder(asked.run), asked.to, asked.project, asked.follow), "steps sent")
