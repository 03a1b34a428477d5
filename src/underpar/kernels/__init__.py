"""Operators. A plain reference defines each one; faster backends must equal it."""
