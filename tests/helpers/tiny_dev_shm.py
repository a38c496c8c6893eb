"""A program for a mount namespace of its own: makes /dev/shm tiny and full, and uses 64 MiB of shared memory."""

import os
import subprocess
import sys

import torch

import echelon


def use_much(group):
    """Returns the backend's name and a sum that went through memory shared by all ranks."""
    tensor = group.empty(8 << 20).fill_(group.rank + 1.0)
    group.all_reduce(tensor)
    group.all_reduce(torch.ones(1 << 20))
    return group.backend.name, tensor[-1].item()


def main():
    """Prints the name of the backend and what came out."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
    with open("/dev/shm/full", "wb") as file, open("/dev/zero", "rb") as zeros:
        try:
            file.write(zeros.read(1 << 20))
            file.flush()
        except OSError:
            pass
    free = os.statvfs("/dev/shm").f_bfree
    print("free", free, *echelon.spawn(use_much, 2, backend="auto"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
