"""Weights -> integers and scales, by name pattern."""
