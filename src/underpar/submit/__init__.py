"""The counted script: what it runs (entry.py), and how it is made (bundle.py)."""
