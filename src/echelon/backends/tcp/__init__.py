"""Ranks on one host or several, over TCP: one authenticated connection for each pair."""
