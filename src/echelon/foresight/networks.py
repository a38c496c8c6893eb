"""Cluster of a foreseen job: a network of the simulation's table with the hosts of the job."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.errors import LaunchError
from echelon.foresight.play.cluster import Cluster, hosts_of
from echelon.foresight.play.device import Device
from echelon.simulation.network import Network


def cluster_of(
    network: Network | str,
    device: Device,
    world_size: int,
    hosts: int | Sequence[int] | None = None,
    *,
    rails: int = 0,
    oversubscription: float = 1.0,
) -> Cluster:
    """Returns the cluster of `world_size` ranks.

    Args:
        network: A network, or the name of one. Its bandwidth is that of a rank, by all of its NICs. GPUs of a host are
            joined by the device's own links.
        device: The device of every rank.
        world_size: Number of ranks.
        hosts: Number of hosts of equal size, or number of ranks of each. None: those of the network, else as many as
            needed.
        rails: Networks between hosts, see `Cluster`.
        oversubscription: See `Cluster`.

    Raises:
        LaunchError: the network is unknown, or the hosts do not have `world_size` ranks.
    """
    measured = {name: Network(*figures) for name, figures in device.networks.items()}
    chosen = Network.named(network, measured) if isinstance(network, str) else network
    if not isinstance(chosen, Network):
        raise LaunchError(f"network={network!r}: give a Network or the name of one")
    if hosts is None and chosen.hosts is not None:
        hosts = chosen.hosts
    name = network.lower() if isinstance(network, str) else ""
    links = next((each for known, each in device.links.items() if known.lower() == name), {})
    # A device of NCCL's tables: a GPU, joined to the others of its host by links of its own.
    has_own_links = bool(device.generation)
    return Cluster(
        hosts=hosts_of(world_size, hosts, device.per_host),
        bandwidth=chosen.bandwidth,
        latency=chosen.latency,
        local_bandwidth=device.local_bandwidth if has_own_links else chosen.local_bandwidth,
        local_latency=chosen.local_latency,
        rails=rails,
        oversubscription=oversubscription,
        generation=device.generation,
        links=links,
        # Measured links include the work of the hosts already.
        overheads={} if links else device.links.get("loopback", {}),
    )
