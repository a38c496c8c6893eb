"""Timelines: spans of time per rank, simulated or measured, and their pictures. Pure."""
