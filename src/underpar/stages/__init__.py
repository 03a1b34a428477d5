"""One file per verb: a whole stage, from files to files."""
