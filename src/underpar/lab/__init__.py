"""Measuring: paired timings, statistics of scores, the table of benchmarks."""
