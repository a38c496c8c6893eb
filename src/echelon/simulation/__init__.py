"""Simulated ranks: the real program in one process, deterministic, in virtual time, with a network and faults."""

from echelon.simulation.costs import Measured, Measurements
from echelon.simulation.faults import Delay, Fault, Kill, NetworkPartition, Pause, Slow
from echelon.simulation.network import PRESETS, Network
from echelon.simulation.run import Simulation, explore, simulate

__all__ = [
    "PRESETS",
    "Delay",
    "Fault",
    "Kill",
    "Measured",
    "Measurements",
    "Network",
    "NetworkPartition",
    "Pause",
    "Simulation",
    "Slow",
    "explore",
    "simulate",
]
