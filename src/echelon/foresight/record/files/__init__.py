"""Files of a recorded program, which are not written where it says."""
