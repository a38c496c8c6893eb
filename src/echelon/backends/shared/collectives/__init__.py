"""Collectives on shared memory."""
