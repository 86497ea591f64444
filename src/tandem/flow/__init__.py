"""What a run consists of: its models, and the stages of a step."""
