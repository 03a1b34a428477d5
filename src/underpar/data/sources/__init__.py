"""Where text comes from: files of several kinds, and downloads."""
