"""Roles: an engine that they are given, and algorithms, make the methods that a script calls."""
