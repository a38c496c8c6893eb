"""`echelon bench`: speed of a collective, measured as nccl-tests does."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from echelon.bench.request import Request, read_size, size_ladder
from echelon.cli.amounts import read_hosts
from echelon.errors import LaunchError
from echelon.launch.environment import is_rank

_MOST_RANKS = 1024  # above it a number is a slip of the keyboard


def bench(
    operation: Annotated[
        str, typer.Argument(metavar="OPERATION", help="A collective such as all_reduce, or send_recv.")
    ],
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", help="Number of ranks to start.  [default: 2]")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, shm, tcp, gloo, nccl, or simulated (virtual time).")] = "auto",
    smallest: Annotated[str, typer.Option("-b", "--min", metavar="BYTES", help="Smallest array.")] = "8",
    largest: Annotated[str, typer.Option("-e", "--max", metavar="BYTES", help="Largest array.")] = "64M",
    factor: Annotated[int, typer.Option("-f", "--factor", help="Size multiplier.")] = 2,
    dtype: Annotated[str, typer.Option(help="Element type, such as bfloat16.")] = "float32",
    op: Annotated[str, typer.Option(help="Reduction, such as sum or max.")] = "sum",
    root: Annotated[int, typer.Option(help="Source of a broadcast or scatter, destination of a reduce or gather.")] = 0,
    algorithm: Annotated[
        str | None, typer.Option(help="Message-passing algorithm, such as ring.  [default: auto]")
    ] = None,
    vs: Annotated[
        str | None, typer.Option(metavar="gloo|mpi", help="Also measure a peer, in turns with Echelon.")
    ] = None,
    turns: Annotated[int, typer.Option(help="Timed runs of each; their median counts.")] = 5,
    iterations: Annotated[int | None, typer.Option(help="Calls per turn.  [default: as many as take 50 ms]")] = None,
    network: Annotated[
        str | None, typer.Option(metavar="NAME", help="Network between simulated ranks.  [default: 10GbE]")
    ] = None,
    local_network: Annotated[
        str | None, typer.Option(metavar="NAME", help="Network inside a simulated host.  [default: shared-memory]")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="HOSTS", help="Hosts of simulated ranks: a,a,b,b, or 2x2 (2 hosts of 2 ranks)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Measures a collective on new ranks of this host, or as one rank of a launcher's job.

    Prints the columns of nccl-tests. algbw is size / time, busbw the bus bandwidth (comparable to the hardware's
    peak), wrong the number of wrong elements on all ranks. Exits with status 1 if any element was wrong.
    """
    sizes = size_ladder(read_size("--min", smallest), read_size("--max", largest), factor)
    name = operation.replace("-", "_")
    request = Request(
        name, sizes, dtype, op, root, algorithm and algorithm.replace("-", "_"), turns, iterations, vs, as_json
    )
    backend = request.backend(backend)
    for option, value in (("--network", network), ("--local-network", local_network), ("--hosts", hosts)):
        if value is not None and backend != "simulated":
            raise LaunchError(f"{option} {value}: only simulated ranks have that; add --backend simulated")
    if local_network is not None and hosts is None:
        raise LaunchError(f"--local-network {local_network}: there are no hosts; add --hosts, as 2x2")
    # Under a launcher the number of ranks is the launcher's, and its processes are the ranks.
    if is_rank(os.environ):
        if num_ranks is not None or backend == "simulated":
            raise LaunchError("this is a rank that a launcher started: leave out -n and --backend simulated")
        from echelon.bench.start import run_as_rank

        return 1 if run_as_rank(request, backend) else 0
    count = 2 if num_ranks is None else num_ranks
    if not 1 <= count <= _MOST_RANKS:
        raise LaunchError(f"-n {count}: give 1 to {_MOST_RANKS} ranks")
    request.check(count)

    # Imports torch, which takes seconds: a wrong argument is reported before.
    from echelon.bench.start import network_of, run

    link = None
    if backend == "simulated":
        names = None if hosts is None else read_hosts(hosts, count)
        between, inside = network or "10GbE", local_network or "shared-memory"
        link = network_of(between, inside, names)
        request = replace(request, network=between if names is None else f"{between}, {inside} inside hosts")
    return 1 if run(request, count, backend, link) else 0
