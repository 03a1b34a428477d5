"""Readings of the accelerator: parsing, and silence where there is none."""

import pytest
import torch

from underpar.lab import clocks
from underpar.lab.clocks import ClockSample, parse_clock_sample, start_clock_sample

LINE = "1980, 3201, 691.50, 56, 0x0000000000000004\n"


def test_readings_are_averaged_and_flags_united() -> None:
    output = LINE + "1960, 3201, 690.50, 58, 0x0000000000000020\n"
    assert parse_clock_sample(output) == ClockSample(2, 1970.0, 3201.0, 691.0, 57.0, 0x24)


def test_a_line_cut_short_is_left_out() -> None:
    assert parse_clock_sample(LINE + "1200, 3201, 100.0, 50, 0x0000") == parse_clock_sample(LINE)
    assert parse_clock_sample(LINE + "1200, 32") == parse_clock_sample(LINE)


def test_values_that_are_not_reported_are_none() -> None:
    sample = parse_clock_sample("1980, [N/A], [N/A], 40, [N/A]\n")
    assert sample == ClockSample(1, 1980.0, None, None, 40.0, 0)


@pytest.mark.parametrize("output", ["", "\n", "No devices were found\n", "1, 2, 3\n"])
def test_other_output_gives_no_sample(output: str) -> None:
    assert parse_clock_sample(output) is None


def test_nothing_is_started_without_an_accelerator_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(clocks.subprocess, "Popen", fail)
    monkeypatch.setattr(clocks.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert start_clock_sample()() is None
    monkeypatch.setattr(clocks.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert start_clock_sample()() is None
