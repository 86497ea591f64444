"""Launchers by the names of their files."""
