"""Ordinary programs of torch.distributed, a module for each family; nothing in them knows of simulated ranks."""
