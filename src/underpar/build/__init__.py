"""The composition root: it builds models, predictors and scores from a recipe and its levers.

Other packages see levers only as the hooks that this package plugs in.
"""
