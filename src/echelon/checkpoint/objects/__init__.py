"""State of a program's models, optimizers and random generators, by names that fit any layout."""
