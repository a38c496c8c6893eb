"""Calls of collectives: from arguments to chunks, and from chunks to messages."""
