"""Formats of frames, records and shared memory, as data. Pure."""
