"""The loops: reinforcement learning, rows, pairs, distillation."""
