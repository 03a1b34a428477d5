"""Measurements: benchmarks, statistics, ablations, tables, the forward pass of a recipe."""
