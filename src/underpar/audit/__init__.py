"""Findings about a score: pass, fail or not shown, each with its evidence."""
