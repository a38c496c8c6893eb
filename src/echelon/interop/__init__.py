"""Adapters to other libraries: `import echelon.interop.torch_distributed` makes it a backend of torch.distributed."""
