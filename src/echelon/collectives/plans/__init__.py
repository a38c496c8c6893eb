"""Collective algorithms as values: plans, their checker, simulator, pictures and selection. Pure."""
