"""`echelon tune`: which algorithms are the best on this system."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from echelon.bench.sizes import read_size, size_ladder
from echelon.cli.hosts import read_hosts
from echelon.errors import LaunchError
from echelon.launch.environment import is_rank

_MOST_RANKS = 1024


def tune(
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", help="How many ranks to start.  [default: 2]")
    ] = None,
    backend: Annotated[str, typer.Option(help="tcp, or simulated: in virtual time.")] = "tcp",
    largest: Annotated[str, typer.Option("-e", "--max", metavar="BYTES", help="The largest array.")] = "16M",
    turns: Annotated[int, typer.Option(help="How often each algorithm takes its turn; the median counts.")] = 5,
    network: Annotated[
        str | None, typer.Option(metavar="NAME", help="Between simulated ranks.  [default: 10GbE]")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="Of simulated ranks, as a,a,b,b, or 2x2: two of two ranks.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where to write.  [default: $XDG_CONFIG_HOME/echelon/tuned.json]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is written.")] = False,
) -> None:
    """Measures messages and all algorithms of the collectives, and writes which are the best.

    Run it on the ranks that jobs will have: -n of this host, or under a launcher on several. Jobs whose rank 0 finds
    the file go by it on all ranks. ECHELON_TUNED names another file, or is "off".
    """
    from echelon.bench.start_tuning import Tuning, run, run_as_rank

    tuning = Tuning(size_ladder(8, read_size("--max", largest), 8), turns, output, as_json)
    if backend not in ("tcp", "simulated"):
        raise LaunchError(f"--backend {backend}: algorithms are of messages; give tcp or simulated")
    for option, value in (("--network", network), ("--hosts", hosts)):
        if value is not None and backend != "simulated":
            raise LaunchError(f"{option} {value}: only simulated ranks have that; add --backend simulated")
    if backend == "simulated" and output is None:
        raise LaunchError("--backend simulated is not this system: name a file of its own, as --output tuned.json")
    if is_rank(os.environ):
        if num_ranks is not None or backend == "simulated":
            raise LaunchError("this is a rank that a launcher started: leave out -n and --backend simulated")
        run_as_rank(tuning, backend)
        return
    count = 2 if num_ranks is None else num_ranks
    if not 2 <= count <= _MOST_RANKS:
        raise LaunchError(f"-n {count}: give 2 to {_MOST_RANKS} ranks")
    link = None
    if backend == "simulated":
        from echelon.bench.networks import network_of

        link = network_of(network or "10GbE", "shared-memory", None if hosts is None else read_hosts(hosts, count))
    run(tuning, count, backend, link)
