"""Stages: one rank's part of a model, with a backward that may be split."""
