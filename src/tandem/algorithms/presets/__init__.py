"""The presets, described: their papers, what to watch, and their pages."""
