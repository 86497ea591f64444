"""Data sets: rows of one format from folders, files, the hub and generators, and a loader that can resume."""
