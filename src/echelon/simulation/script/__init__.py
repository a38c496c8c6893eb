"""Scripts on simulated ranks: `echelon simulate` runs one as each rank of a simulated world, in this process."""
