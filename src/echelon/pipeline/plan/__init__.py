"""Schedules as values: checked, simulated, compared and lowered to programs. Pure."""
