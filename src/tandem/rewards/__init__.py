"""Rewards: functions and models that judge completions. Worker processes import this package, so it imports nothing
heavy."""
