"""Models that read images or sounds, with one file per family."""
