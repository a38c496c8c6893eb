"""Benchmarks of collectives with the columns of nccl-tests, against Gloo and MPI; tuning of algorithms."""
