"""Text to tokens and back, and the source bytes of each token."""
