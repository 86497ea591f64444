"""Models that see and hear: one file a family."""
