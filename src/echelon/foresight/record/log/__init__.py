"""One rank's step as it is recorded: entries, memory, modules, phases, and steps that repeat."""
