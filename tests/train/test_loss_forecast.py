"""The forecast on curves whose end is known."""

import math

import numpy as np
import pytest

from underpar.stages.train import ProgressLine
from underpar.train.loss_forecast import Forecast

# Seconds and losses of PR 2014 (three seeds), which trained for 596 s.
PUBLISHED_SECONDS = [45.8, 93.7, 142.1, 190.6, 253.0, 323.6, 394.1, 466.3, 539.3]
PUBLISHED_LOSSES = {
    42: [2.6096, 2.5845, 2.6246, 2.6554, 2.5089, 2.4572, 2.4626, 2.3802, 2.3439],
    314: [2.6021, 2.5854, 2.6240, 2.6545, 2.5045, 2.4569, 2.4649, 2.3791, 2.3422],
    0: [2.6121, 2.5871, 2.6251, 2.6573, 2.5086, 2.4567, 2.4671, 2.3797, 2.3452],
}


def forecast_of(progress: np.ndarray, losses: np.ndarray) -> float | None:
    forecast = Forecast(1.0)
    for p, loss in zip(progress.tolist(), losses.tolist(), strict=True):
        forecast.add(p, loss)
    return forecast.final()


@pytest.mark.parametrize("share", [0.31, 0.5, 0.7, 0.95])
def test_its_own_law_is_continued_exactly(share: float) -> None:
    p = np.arange(1, 2001) / 2000
    losses = 2.4 - 0.3 * np.log(p)
    final = forecast_of(p[p < share], losses[p < share])
    # To a bin: the mean of logarithms is not that of a line.
    assert final == pytest.approx(2.4 - 0.3 * math.log(0.95), abs=1e-6)


@pytest.mark.parametrize("exponent", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_noisy_power_laws_end_near_the_forecast(exponent: float, seed: int) -> None:
    # Steeper laws flatten sooner than the forecast: an exponent of 0.5 is missed by 0.06 at 0.7.
    p = np.arange(1, 3001) / 3000
    noise = np.random.default_rng(seed).normal(0, 0.05, len(p))
    losses = 2.0 + 0.5 * p**-exponent + noise
    tail = float(losses[p > 0.9].mean())
    for share, error in ((0.5, 0.06), (0.7, 0.03), (0.9, 0.015)):
        assert forecast_of(p[p < share], losses[p < share]) == pytest.approx(tail, abs=error)


@pytest.mark.parametrize("seed", PUBLISHED_LOSSES)
def test_the_published_curve_from_its_first_seven_tenths(seed: int) -> None:
    p = np.array(PUBLISHED_SECONDS) / 596
    losses = np.array(PUBLISHED_LOSSES[seed])
    final = forecast_of(p[p < 0.7], losses[p < 0.7])
    # One micro-batch every 500 steps: the last point alone stands for the last tenth.
    assert final == pytest.approx(losses[-1], abs=0.03)


def test_nothing_is_said_too_early_or_from_too_little() -> None:
    p = np.arange(1, 1001) / 1000
    assert forecast_of(p[p < 0.3], 3 - p[p < 0.3]) is None
    assert forecast_of(p[p < 0.31], 3 - p[p < 0.31]) is not None
    assert forecast_of(np.array([0.4, 0.5]), np.array([3.0, 2.9])) is None
    assert Forecast(1.0).final() is None


def test_broken_and_first_losses_are_left_out() -> None:
    forecast = Forecast(1.0)
    for i in range(500):
        forecast.add(i / 1000, math.nan if i % 7 == 0 else 3.0)
    assert forecast.final() == pytest.approx(3.0)


def test_a_rising_loss_is_not_continued() -> None:
    p = np.arange(1, 501) / 1000
    final = forecast_of(p, 3 + p)
    assert final is not None and final < 3.5


def test_progress_beyond_the_budget_is_the_last_bin() -> None:
    p = np.arange(1, 1051) / 1000
    assert forecast_of(p, np.full(len(p), 2.0)) == pytest.approx(2.0)


def test_bits_per_byte_follow_from_the_tokens_of_a_byte() -> None:
    forecast = Forecast(tokens_per_byte=0.25)
    assert forecast.final_train_bpb() is None
    for i in range(1, 501):
        forecast.add(i / 1000, 4 * math.log(2))
    assert forecast.final_train_bpb() == pytest.approx(1.0)


def priced(forecast: Forecast, prices: dict[float, float]) -> list[float]:
    """The forecasts of the held-out text in the lines of a run; 0 where there is none."""
    lines = [{"progress": i / 100, "loss": 3.0} for i in range(100)]
    for line in lines:
        if line["progress"] in prices:
            line["val_bpb"] = prices[line["progress"]]
    return [forecast.see(line).get("forecast_bpb", 0.0) for line in lines]


def test_the_held_out_text_is_forecast_from_its_own_prices() -> None:
    """By the law that prices follow, whatever the losses of the training text do."""
    forecast = priced(Forecast(1.0), {p: 2 - 0.25 * math.log(p) for p in (0.1, 0.25, 0.5, 0.75)})
    # From the second price and from 0.3 on.
    assert not any(forecast[:30]) and forecast[30:] == pytest.approx([2.0] * 70)


def test_one_price_is_no_forecast() -> None:
    assert not any(priced(Forecast(1.0), {0.5: 1.5}))


def test_old_prices_count_where_there_are_no_others() -> None:
    law = {p: 2 - 0.25 * math.log(p) for p in (0.5, 0.75)}
    # Both are from before a quarter of the progress; then there are two that are not.
    forecast = priced(Forecast(1.0), {0.05: 3.0, 0.1: 3.0} | law)
    assert forecast[49] == 3.0 and forecast[-1] == pytest.approx(2.0)


def test_a_forecast_of_the_held_out_text_begins_at_its_last_price() -> None:
    forecast = priced(Forecast(1.0), {0.25: 2.0, 0.5: 2.5, 0.75: 2.25})
    # Prices that rise may fall again; they are not said to rise on.
    assert (forecast[50], forecast[-1]) == (2.5, 2.25)
    noisy = Forecast(1.0)
    assert priced(noisy, {0.25: 2.0, 0.5: math.nan, 0.75: 1.5})[-1] < 1.5


def test_averaged_weights_are_forecast_where_a_run_has_them() -> None:
    forecast = Forecast(1.0)
    for p in (0.25, 0.5):
        line = {"progress": p, "loss": 3.0, "val_bpb": 9.0, "average_val_bpb": 1.25}
        fields = forecast.see(line)
    assert fields == {"forecast_bpb": 1.25}


def test_a_watcher_reads_the_forecast_and_the_last_validation() -> None:
    line = {"step": 1200, "progress": 0.5, "loss": 2.5, "tokens": 1000, "seconds": 2.0}
    watch = ProgressLine([line | {"val_bpb": 1.3, "average_val_bpb": 1.2}])
    ahead = {"forecast_train_bpb": 1.0625}
    words = watch.add(line | {"tokens_per_second": 1500.0, "mfu": 0.5} | ahead)
    assert words == (
        "step 1,200, loss 2.500, held-out 1.2000 BPB, heading for 1.0625 BPB of training text, "
        "1,500 tokens/s, MFU 50%"
    )
    # The text that counts, where it is forecast.
    words = watch.add(line | ahead | {"forecast_bpb": 1.125})
    assert ", heading for 1.1250 BPB, " in words and "training text" not in words
    assert ", held-out 1.2500 BPB, " in watch.add(line | {"val_bpb": 1.25})
    assert ", held-out 1.2500 BPB, " in watch.add(line)
    assert ProgressLine().add(line) == "step 1,200, loss 2.500, 500 tokens/s"
