"""Several ranks: one curve on any number of them, errors that end all, a lost rank, a restart.

Started by torchrun this file is one rank of the jobs below.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist

from underpar import cli
from underpar.core.dist import (
    ask_main,
    from_main,
    gather_shares,
    process_group,
    require_on_main,
    require_same,
)
from underpar.core.locks import lock_on_main
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime, open_runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.batch import Batch
from underpar.data.folder import load_data
from underpar.data.loader import Loader, MicroBatch, micros_of_rank
from underpar.errors import UnderparError
from underpar.model.network import Eager
from underpar.quant.files import read_measured
from underpar.recipe import load_recipe
from underpar.stages.train import make_trainer, train
from underpar.train.feed import Feed
from underpar.train.step import mean_loss, open_loader, step_of

STEPS = 10
SETS = [f"train.budget_steps={STEPS}", "train.checkpoint_seconds=0", "model.num_layers=2"]
SETS += ["train.num_micro_batches=4", "train.micro_batch_tokens=256", "levers.ema=true"]
SETS += ["quant.rules=['blocks.*.weight grid1', '* fp16']"]

# Short sequences on the first of two ranks, long ones on the second, as in PR 1219.
MIXED = [*SETS, "train.order=sequences", "train.contexts=[32, 128]", "train.micro_sizes=[320, 256]"]

# Ranks add up the same fp32 gradients in another order. 1e-7 was measured over these steps.
TOLERANCE = 1e-5

# Where the second rank is killed: in this step, so that the checkpoint is of the one before.
LOST_STEP = 6
BROKEN_STEP = 3
# Inputs, their numbers and their largest; gradients and their numbers.
CALIBRATION_SUMS = 5


def train_words(data: Path, out: Path, values: Sequence[str] = SETS) -> list[str]:
    sets = [word for value in values for word in ("--set", value)]
    words = ["--data", str(data), "--out", str(out), "--device", "cpu", "--json"]
    return ["train", "baseline+cpu", *words, *sets]


def launch(num_ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Run torchrun to its end."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, f"--nproc-per-node={num_ranks}", *map(str, words)],
        # Bit for bit needs the same number of threads everywhere.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def losses(folder: RunFolder) -> list[float]:
    lines = list(folder.metrics())
    assert [m["step"] for m in lines] == list(range(1, STEPS + 1))
    return [m["loss"] for m in lines]


@pytest.fixture(scope="module")
def alone(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> RunFolder:
    """The run on one rank."""
    folder = RunFolder(tmp_path_factory.mktemp("ranks") / "one")
    assert train(load_recipe("baseline+cpu", SETS), tiny_data, folder, runtime)["finished"]
    return folder


@pytest.fixture(scope="module")
def together(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks trained without interruption and then met the situations below."""
    folder = tmp_path_factory.mktemp("ranks")
    done = launch(2, __file__, "meet", tiny_data, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pair(together: Path) -> RunFolder:
    """The run on two ranks."""
    return RunFolder(together / "run")


@pytest.fixture(scope="module")
def answers(together: Path) -> list[dict[str, Any]]:
    """What each rank said in each situation."""
    return [json.loads((together / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_one_global_batch(num_ranks: int, tiny_data: Path) -> None:
    part = load_recipe("baseline+cpu", SETS).train
    loader = Loader(load_data(tiny_data).train, step_of(part), part.seed, part.order)
    whole = [loader.batch(step, micro) for step in (3, 4) for micro in range(4)]
    shares: list[Batch] = []
    for rank in range(num_ranks):
        feed = Feed(loader, Runtime(torch.device("cpu"), rank, num_ranks))
        batches = feed.at(3)
        shares += [next(batches) for _ in range(8 // num_ranks)]
        feed.close()
    actual, wanted = (sorted(b.inputs.tolist() for b in batches) for batches in (shares, whole))
    assert actual == wanted


def test_two_ranks_train_like_one(alone: RunFolder, pair: RunFolder) -> None:
    assert losses(pair) == pytest.approx(losses(alone), rel=TOLERANCE)


def test_two_ranks_calibrate_like_one(alone: RunFolder, pair: RunFolder) -> None:
    """Inputs and gradients are summed over ranks, each batch read by one of them."""
    one, two = (read_measured(f.calibration_file, torch.device("cpu")) for f in (alone, pair))
    assert one.calibration.num_tokens == two.calibration.num_tokens == 4 * 2048
    assert one.fisher.num_tokens == two.fisher.num_tokens == 2 * 2048
    for name, hessian in one.calibration.hessians.items():
        summed = two.calibration.hessians[name]
        assert (summed - hessian).norm() < 1e-3 * hessian.norm(), name
        # A label that is drawn otherwise changes a little.
        assert torch.allclose(two.fisher.outputs[name], one.fisher.outputs[name], rtol=0.05)


def test_ranks_of_different_lengths_train_like_one(
    together: Path, tiny_data: Path, tmp_path: Path, runtime: Runtime
) -> None:
    recipe = load_recipe("baseline+cpu", MIXED)
    plan = step_of(recipe.train)
    for rank, size in enumerate((MicroBatch(320, 32), MicroBatch(256, 128))):
        assert {plan[m] for m in micros_of_rank(len(plan), rank, 2)} == {size}
    one = RunFolder(tmp_path / "one")
    assert train(recipe, tiny_data, one, runtime)["finished"]
    assert losses(RunFolder(together / "mixed")) == pytest.approx(losses(one), rel=TOLERANCE)
    # A step's loss is the mean over micro-batches, whatever their sizes.
    data, model = (
        load_data(tiny_data),
        make_trainer(recipe, load_data(tiny_data), one, runtime).model,
    )
    loader = open_loader(data.train, recipe.train)
    means = [float(mean_loss(model, loader.batch(0, m)).detach()) for m in range(len(plan))]
    assert losses(one)[0] == pytest.approx(fmean(means), rel=TOLERANCE)


@pytest.mark.slow
def test_four_ranks_train_like_one(alone: RunFolder, tiny_data: Path, tmp_path: Path) -> None:
    done = launch(4, "-m", "underpar", *train_words(tiny_data, tmp_path))
    assert done.returncode == 0, done.stderr
    assert losses(RunFolder(tmp_path)) == pytest.approx(losses(alone), rel=TOLERANCE)


@pytest.mark.slow
def test_a_lost_rank_is_replaced_and_the_run_goes_on_without_a_shared_folder(
    pair: RunFolder, tiny_data: Path, tmp_path: Path
) -> None:
    done = launch(2, "--max-restarts=1", __file__, "lose", tiny_data, tmp_path)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: rank 0 of 2 lost another one (")
    assert "start the same command again" in errors[0]
    # In their second life both ranks take only the steps after the checkpoint.
    lives = {path.name: int(path.read_text()) for path in tmp_path.glob("life-*")}
    assert set(lives) == {"life-1-rank-0", "life-1-rank-1"}
    assert all(num_sums < STEPS + CALIBRATION_SUMS for num_sums in lives.values())
    folder = RunFolder(tmp_path / "node-0")
    assert losses(folder) == losses(pair)
    ours, theirs = (read_tensors(f.weights_file)[0] for f in (folder, pair))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not (tmp_path / "node-1").exists()


def test_the_main_rank_answers_for_all(answers: list[dict[str, Any]]) -> None:
    assert [a["asked"] for a in answers] == [[0.0, 0.0]] * 2
    assert [a["gathered"] for a in answers] == [[[0.0, 0.0], [1.0, 1.0]]] * 2


def test_work_of_the_main_rank_that_fails_ends_all(answers: list[dict[str, Any]]) -> None:
    assert [a["failed"] for a in answers] == [
        "OSError: disk full",
        "RunError: rank 1 stops: the main rank failed, and says why",
    ]


def test_a_run_in_use_is_refused_by_all_ranks(answers: list[dict[str, Any]]) -> None:
    main, other = (a["in use"] for a in answers)
    assert main.startswith("RunError: ") and "run is in use by process" in main
    assert other == "RunError: rank 1 stops: the main rank failed, and says why"


def test_ranks_that_train_different_things_are_refused(answers: list[dict[str, Any]]) -> None:
    message = "RunError: rank 1 has data 1, the main rank data 0; give every node the same"
    assert all(a["differing"].startswith(message) for a in answers)


def test_a_broken_loss_ends_every_rank(answers: list[dict[str, Any]]) -> None:
    main, other = (a["broken"] for a in answers)
    assert main.startswith(f"RunError: stopped at step {BROKEN_STEP}: the loss is nan")
    assert other == "RunError: rank 1 stops: the main rank failed, and says why"


def test_a_checkpoint_that_only_another_rank_has_is_named(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["misplaced"].startswith("RunError: rank 1 has ")
        assert "the main rank has not: copy" in answer["misplaced"]


def test_a_rank_that_hangs_is_given_up(answers: list[dict[str, Any]]) -> None:
    message = answers[0]["hung"]
    assert message.startswith("RunError: rank 0 of 2 lost another one (Timed out")
    assert "\n" not in message


def train_and_lose_a_rank(data: Path, folder: Path) -> None:
    """Train as one rank, on a node of its own; in its first life the second one is killed."""
    runtime, life = open_runtime("cpu"), os.environ["TORCHELASTIC_RESTART_COUNT"]
    num_sums, all_reduce = 0, dist.all_reduce

    # One a step.
    def count_sums(*args: Any, **options: Any) -> Any:
        nonlocal num_sums
        num_sums += 1
        if (runtime.rank, life, num_sums) == (1, "0", LOST_STEP):
            os.kill(os.getpid(), signal.SIGKILL)
        return all_reduce(*args, **options)

    dist.all_reduce = count_sums
    # torchrun ends the survivors; what they have to say first is part of the test.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_command(train_words(data, folder / f"node-{runtime.rank}"))
    (folder / f"life-{life}-rank-{runtime.rank}").write_text(str(num_sums))


def run_command(words: list[str]) -> None:
    """What the command line does; returns where it succeeds."""
    sys.argv[1:] = words
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except (UnderparError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train_and_meet_situations(data: Path, folder: Path) -> None:
    """Train as one of two ranks, then meet what goes wrong between them."""
    runtime = open_runtime("cpu")
    run_command(train_words(data, folder / "run"))
    run_command(train_words(data, folder / "mixed", MIXED))
    own_answers = folder / f"{runtime.rank}.json"
    with process_group(runtime):
        answers = meet_situations(data, folder, runtime)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        if runtime.is_main:
            answers["hung"] = error_of(lambda: from_main(0.0, runtime))
        own_answers.write_text(json.dumps(answers))
        # The second rank is there and silent until the first has given it up.
        while not (folder / "0.json").exists():
            time.sleep(0.01)


def meet_situations(data: Path, folder: Path, runtime: Runtime) -> dict[str, Any]:
    share, own_file = torch.full((2,), float(runtime.rank)), folder / f"only-{runtime.rank}"
    if not runtime.is_main:
        own_file.touch()
    return {
        "asked": ask_main(lambda: share, runtime).tolist(),
        "gathered": gather_shares(share[None], runtime).tolist(),
        "failed": error_of(lambda: ask_main(fill_disk, runtime)),
        "differing": error_of(lambda: require_same(f"data {runtime.rank}", runtime)),
        "misplaced": error_of(lambda: require_on_main(own_file, runtime)),
        "in use": error_of(lambda: lock_twice(folder / "run", runtime)),
        "broken": error_of(lambda: break_loss(data, folder, runtime)),
    }


def lock_twice(folder: Path, runtime: Runtime) -> None:
    with lock_on_main(folder, runtime), lock_on_main(folder, runtime):
        pass


def fill_disk() -> None:
    raise OSError("disk full")


def break_loss(data: Path, folder: Path, runtime: Runtime) -> None:
    """Train until the second rank's share of a step is no number."""
    recipe = load_recipe("baseline+cpu", SETS)
    trainer = make_trainer(recipe, load_data(data), RunFolder(folder), runtime)

    class Broken(Eager):
        """Loses the second rank's loss in one step."""

        def end(self, *args: Any) -> Any:
            broken = runtime.rank == 1 and trainer.position.step == BROKEN_STEP - 1
            return super().end(*args) * (float("nan") if broken else 1.0)

    trainer.runner = Broken()
    trainer.run()


if __name__ == "__main__":
    job = {"lose": train_and_lose_a_rank, "meet": train_and_meet_situations}[sys.argv[1]]
    job(Path(sys.argv[2]), Path(sys.argv[3]))
