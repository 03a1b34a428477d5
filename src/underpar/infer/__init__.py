"""Probabilities from an artifact: many tokens at once, or one token of each lane at a time."""
