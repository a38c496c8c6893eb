"""What ranks say to each other: algorithms as plans, and the interpreter that runs them."""
