"""Byte layouts of frames, message records and shared memory, as data. Pure."""
