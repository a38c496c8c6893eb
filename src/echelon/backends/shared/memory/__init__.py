"""Shared memory of one host: file, mappings, set-up and waiting."""
