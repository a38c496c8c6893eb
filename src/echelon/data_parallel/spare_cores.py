"""Says whether a core is left over for reductions."""

from __future__ import annotations

import os

import torch

from echelon.group import ProcessGroup


def has_time_beside(group: ProcessGroup) -> bool:
    """Says whether a reduction can run beside the computation without taking time from it.

    Where all ranks share memory it takes a core while it runs, so there must be one that computes nothing. Ranks may
    come to different answers: what they send, and in which order, does not depend on it.
    """
    if not group.backend.shares_memory or len(set(group.hosts)) > 1:
        return True
    hosts = group.backend.hosts
    num_local = hosts.count(hosts[group.backend.rank])
    return num_local * torch.get_num_threads() < len(os.sched_getaffinity(0))
