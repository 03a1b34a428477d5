"""Operators with a plain reference each; faster backends stand beside it and must equal it."""
