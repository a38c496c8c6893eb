"""Stages: one rank's parts of a model, with backwards that may be split into I and W."""
