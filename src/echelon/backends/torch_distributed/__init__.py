"""Collectives by the engines of torch.distributed: Gloo, NCCL, MPI, UCC."""
