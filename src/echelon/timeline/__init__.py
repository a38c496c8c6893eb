"""Timelines: spans of time per rank, planned or measured, and how they are drawn. Pure."""
