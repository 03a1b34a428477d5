"""The package as one counted file."""
