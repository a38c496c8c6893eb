"""`echelon bench`: how fast a collective is, as nccl-tests measures it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from echelon.bench.request import Request, read_size, size_ladder
from echelon.cli.amounts import read_hosts
from echelon.errors import LaunchError
from echelon.launch.environment import is_rank

_MOST_RANKS = 1024


def bench(
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="A collective, as all_reduce, or send_recv.")],
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", help="How many ranks to start.  [default: 2]")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, shm, tcp, gloo, nccl, or simulated: in virtual time.")] = "auto",
    smallest: Annotated[str, typer.Option("-b", "--min", metavar="BYTES", help="The smallest array.")] = "8",
    largest: Annotated[str, typer.Option("-e", "--max", metavar="BYTES", help="The largest array.")] = "64M",
    factor: Annotated[
        int, typer.Option("-f", "--factor", help="Each array is so many times as large as the one before.")
    ] = 2,
    dtype: Annotated[str, typer.Option(help="Of the elements, as bfloat16.")] = "float32",
    op: Annotated[str, typer.Option(help="Of a reduction, as sum or max.")] = "sum",
    root: Annotated[int, typer.Option(help="The rank that a broadcast or scatter is from, a reduce or gather to.")] = 0,
    algorithm: Annotated[
        str | None, typer.Option(help="One of messages, as ring.  [default: what a group takes]")
    ] = None,
    vs: Annotated[str | None, typer.Option(metavar="gloo|mpi", help="What to measure as well, in turns.")] = None,
    turns: Annotated[int, typer.Option(help="How often each takes its turn; the median counts.")] = 5,
    iterations: Annotated[int | None, typer.Option(help="Calls in a turn.  [default: as many as take 50 ms]")] = None,
    network: Annotated[
        str | None, typer.Option(metavar="NAME", help="Between simulated ranks.  [default: 10GbE]")
    ] = None,
    local_network: Annotated[
        str | None, typer.Option(metavar="NAME", help="Inside simulated hosts.  [default: shared-memory]")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="Of simulated ranks, as a,a,b,b, or 2x2: two of two ranks.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Measures a collective on ranks of this host, or, started by a launcher, as one of its ranks.

    Prints what nccl-tests prints: algbw is size / time, busbw what of it compares with the hardware's speed, wrong how
    many elements of all results were not right. Ends with status 1 if any were.
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
    if is_rank(os.environ):
        if num_ranks is not None or backend == "simulated":
            raise LaunchError("this is a rank that a launcher started: leave out -n and --backend simulated")
        from echelon.bench.start import run_as_rank

        return 1 if run_as_rank(request, backend) else 0
    count = 2 if num_ranks is None else num_ranks
    if not 1 <= count <= _MOST_RANKS:
        raise LaunchError(f"-n {count}: give 1 to {_MOST_RANKS} ranks")
    request.check(count)

    from echelon.bench.start import network_of, run

    link = None
    if backend == "simulated":
        names = None if hosts is None else read_hosts(hosts, count)
        between, inside = network or "10GbE", local_network or "shared-memory"
        link = network_of(between, inside, names)
        request = replace(request, network=between if names is None else f"{between}, {inside} inside hosts")
    return 1 if run(request, count, backend, link) else 0
