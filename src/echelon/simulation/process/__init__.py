"""State that a process has once and that each simulated rank has for itself, such as the environment."""
