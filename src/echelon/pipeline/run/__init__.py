"""The runtime: one rank's program of a schedule, run over a group."""
