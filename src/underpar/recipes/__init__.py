"""Shipped recipes, one TOML file each."""
