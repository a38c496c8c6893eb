"""Starts ranks, and tells a rank where the others are."""
