"""Rewards: who judges a completion. Workers import this package, so it imports nothing heavy."""
