"""Bits per byte of held-out text: every target priced once, every byte counted on the raw text."""
