"""Store of torch at which some ranks of a world meet before an engine connects them.

Strategy. The first of the ranks serves it and tells the others the port in a message. No other rank is needed: a group
without rank 0 of the world meets even if rank 0 has left.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined] # public, by its docs

from echelon.backends.formats.wire import Tag
from echelon.backends.tcp.backend import TcpBackend
from echelon.errors import ConnectError

PORT_SEQUENCE = (1 << 64) - 2
"""Sequence number of the message with the port of a group's store. Collectives never get as far."""


def meet_at_store(tcp: TcpBackend, ranks: Sequence[int], tag: Tag, timeout: float) -> Store:
    """Returns a store of the first of `ranks`, at the address by which the others reach that rank. All of them call it.

    Args:
        tcp: connects all ranks of the world.
        ranks: the world's rank of each member.
        tag: of the message with the port.
        timeout: in seconds.

    Raises:
        ConnectError: the store cannot be served or reached. PeerFailed, Timeout: the message did not come.
    """
    first, *others = ranks
    if not others:
        return HashStore()
    host, patience = tcp.members[first].host, timedelta(seconds=timeout)
    if tcp.rank == first:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=len(ranks))
        except OSError as error:
            raise ConnectError(
                f"rank {tcp.rank} cannot listen on {host} ({error.strerror}): check that it is an address of this host"
            ) from error
        with listener:
            port = listener.getsockname()[1]
            # torch takes over the socket, and closes it.
            store = TCPStore(
                host, port, None, True, patience, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )
        for rank in others:
            tcp.messages.send(torch.tensor([port], device="cpu"), rank, tag, timeout)
        return store
    port = int(tcp.messages.recv(first, tag, timeout=timeout).item())
    try:
        return TCPStore(host, port, None, False, patience, wait_for_workers=False)
    except RuntimeError as error:
        raise ConnectError(
            f"rank {tcp.rank} cannot reach the store of rank {first} at {host}, port {port}: "
            "check that no firewall blocks it"
        ) from error
