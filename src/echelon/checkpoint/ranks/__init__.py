"""Saves and loads by all ranks: each stores a part, and reads the ranges that it wants."""
