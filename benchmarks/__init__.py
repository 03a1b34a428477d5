"""Studies that are made again with one command each; the package does not import them."""
