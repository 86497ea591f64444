"""Sandboxes, in which untrusted code and tools run."""
