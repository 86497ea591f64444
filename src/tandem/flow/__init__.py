"""The plan of a run: its models, and the stages of a step."""
