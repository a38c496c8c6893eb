"""Collectives as calls: arguments to chunks, chunks to messages."""
