"""What a run will need, said before it starts: memory, time, disk. See docs/planning.md."""
