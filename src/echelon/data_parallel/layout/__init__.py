"""Layouts of gradient buckets and optimizer shards, as values. Pure."""
