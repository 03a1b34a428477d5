"""One file per verb: a whole stage, from files to files. The command line only calls these."""
