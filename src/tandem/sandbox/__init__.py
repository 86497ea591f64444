"""Running code and tools that nobody trusts."""
