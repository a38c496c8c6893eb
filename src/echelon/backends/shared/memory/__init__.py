"""Shared memory of one host: files, mappings, words and waiting."""
