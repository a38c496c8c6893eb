"""Ranks of one host, connected by memory that all of them map."""
