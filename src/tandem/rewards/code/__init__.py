"""Rewards for code: what a model wrote runs in a sandbox, and the verdict is computed outside of it."""
