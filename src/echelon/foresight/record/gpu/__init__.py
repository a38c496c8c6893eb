"""A GPU that is not there: its names, devices, streams and settings, as the program sees them."""
