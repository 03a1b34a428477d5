"""Run folders -> one page that needs no network."""
