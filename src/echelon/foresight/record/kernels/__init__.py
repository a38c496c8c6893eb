"""Operators of torch as kernels of a GPU: their kinds, FLOPs, bytes and memory."""
