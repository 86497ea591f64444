"""Checks of what a machine with a GPU must show; they begin in command.py."""
