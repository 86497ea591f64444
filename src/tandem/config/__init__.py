"""Configuration: frozen dataclasses, and their loading and checks. Never imports torch."""
