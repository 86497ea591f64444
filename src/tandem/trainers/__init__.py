"""The training loops: reinforcement learning, supervised fine-tuning, preference learning, reward models, distillation."""
