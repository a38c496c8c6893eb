"""Runtime of pipelines: runs one rank's program of a schedule over a group."""
