"""Checkpoints that cannot be torn and fit any layout.

Nothing is imported here: the process that writes beside training starts with this package, and torch takes seconds.
"""
