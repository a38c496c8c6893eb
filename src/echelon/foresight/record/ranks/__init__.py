"""Ranks that are recorded, their threads, and their communication."""
