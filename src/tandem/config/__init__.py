"""Configuration: frozen dataclasses, one file a room. Never imports torch."""
