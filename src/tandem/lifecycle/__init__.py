"""The life of a run: its processes, its folder, saving, recovery, oversight."""
