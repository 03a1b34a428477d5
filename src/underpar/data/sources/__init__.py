"""Sources of text: files of several kinds, and downloads."""
