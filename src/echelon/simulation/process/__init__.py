"""State that a process has once and that each simulated rank has for itself: environment, torch.distributed, and more."""
