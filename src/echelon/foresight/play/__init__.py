"""The player: recorded steps on a model of devices and their network. Pure."""
