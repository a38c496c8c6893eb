"""Messages between two ranks of one host, through rings and arenas in shared memory."""
