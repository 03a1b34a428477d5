"""Run folders -> one HTML page."""
