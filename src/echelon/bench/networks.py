"""Networks between simulated ranks, from the names of presets and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from echelon.errors import LaunchError
from echelon.simulation import Network


def network_of(between: str, inside: str, hosts: Sequence[str] | None) -> Network:
    """Returns the network of a preset's name, with hosts whose ranks are joined by that of another.

    Raises:
        LaunchError: an unknown name, or ranks of a host that do not stand together.
    """
    network = Network.named(between)
    if hosts is None:
        return network
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    if len({host for host, _ in runs}) < len(runs):
        raise LaunchError(f"--hosts {','.join(hosts)}: simulated hosts have ranks in a row; give them as a,a,b,b")
    local = Network.named(inside)
    sizes = tuple(count for _, count in runs)
    return replace(network, hosts=sizes, local_latency=local.latency, local_bandwidth=local.bandwidth)
