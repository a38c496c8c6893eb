"""Recorder of a program's step: fake tensors on simulated ranks, of which only some are run."""
