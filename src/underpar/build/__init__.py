"""The composition root: recipe and weights -> model, predictor, scoring method.

Only this package knows both stages and levers.
"""
