"""Collectives of ranks that share memory."""
