"""Start of ranks: launchers, workers, the environment of a rank, and the first connection."""
