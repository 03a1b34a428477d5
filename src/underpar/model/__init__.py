"""The network: shapes come from the recipe, ideas from levers, keys and values from the caller."""
