"""What a machine with a GPU must show: see command.py."""
