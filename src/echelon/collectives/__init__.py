"""Collectives: algorithms as plans, and the interpreter that runs them over messages."""
