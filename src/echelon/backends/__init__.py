"""Backends: they move tensors between ranks and do collectives."""
