"""Collective algorithms as values: checked, timed, drawn and selected. Pure."""
