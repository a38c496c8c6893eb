"""Messages between two ranks through rings in shared memory."""
