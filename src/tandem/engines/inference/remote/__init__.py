"""Engines behind HTTP: the one client of it, and an engine for each kind of server."""
