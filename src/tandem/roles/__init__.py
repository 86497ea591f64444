"""Roles (actor, critic, reference, …): each combines an engine with algorithms, and has the methods that a script calls."""
