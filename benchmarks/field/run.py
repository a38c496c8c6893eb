"""What does torch say on Gloo to bugs that people met, and what does a simulation say?

    python benchmarks/field/run.py                 # a table: a line for each bug
    python benchmarks/field/run.py early_stopping  # one bug, with all that the simulation says

The bugs are in tests/helpers/field_bugs.py. On Gloo each rank is a process that ends with its program, and the store is
not rank 0's, as under torchrun. Every timeout, 30 minutes by default, is set to a few seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import echelon

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
from harness import options_of, print_environment, print_head, print_row
from tests.helpers.field_bugs import BUGS, Bug

TIMEOUT = 6.0
"""Seconds in place of torch's 30 minutes."""
DEADLINE = 4 * TIMEOUT
"""Seconds after which a rank counts as one that never ends."""


class Outcome(NamedTuple):
    """End of one rank on Gloo."""

    text: str
    seconds: float


def main() -> None:
    options = options_of(__doc__)
    options.add_argument("names", nargs="*", metavar="BUG")
    names = options.parse_args().names
    warnings.simplefilter("ignore", FutureWarning)  # of a name that torch renamed in 2.13
    torch.set_num_threads(1)
    if not names:
        print_environment(f"Gloo with timeouts of {TIMEOUT:g} s.")
        print_head("bug | what is wrong | torch on Gloo | the simulation")
    slowest = 0.0
    for name in names or BUGS:
        bug = BUGS[name]
        real = on_gloo(bug)
        found, seconds = simulated(bug)
        slowest = max(slowest, seconds)
        if names:
            print(f"{name}, {bug.thread}: {bug.what}\n\nGloo: {joined(real)}\n\nThe simulation:\n{found}\n")
        else:
            repository, _, number = bug.thread.partition("#")
            link = f"[{bug.thread}](https://github.com/{repository}/issues/{number})"
            print_row(f"`{name}`", f"{bug.what} {link}", joined(real), in_short(found))
    print(f"\nThe slowest simulation took {slowest:.2f} s.")


def simulated(bug: Bug) -> tuple[str, float]:
    """Returns what a simulation says about a bug, and its seconds."""
    began = time.monotonic()
    try:
        results = echelon.simulate(bug.program, bug.ranks).results
    except Exception as error:
        found = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    else:
        found = f"nothing: {results}"
    return found, time.monotonic() - began


def on_gloo(bug: Bug) -> list[Outcome]:
    """Runs a bug on processes with Gloo. Returns the end of each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    began = time.monotonic()
    ranks = []
    for rank in range(bug.ranks):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=be_rank, args=(bug, rank, store.port, writer), daemon=True)
        process.start()
        writer.close()
        ranks.append((process, reader))
    outcomes = [Outcome(f"has not ended after {DEADLINE:g} s", DEADLINE)] * bug.ranks
    waiting = {reader: rank for rank, (_, reader) in enumerate(ranks)}
    while waiting and (left := began + DEADLINE - time.monotonic()) > 0:
        for reader in wait(list(waiting), left):
            rank = waiting.pop(reader)
            try:
                outcomes[rank] = Outcome(reader.recv(), time.monotonic() - began)
            except EOFError:
                ranks[rank][0].join()
                signal_name = signal.Signals(-(ranks[rank][0].exitcode or 0)).name
                outcomes[rank] = Outcome(f"dies of {signal_name}", time.monotonic() - began)
    for process, _ in ranks:
        process.kill()
        process.join()
    return outcomes


def be_rank(bug: Bug, rank: int, port: int, writer: Connection) -> None:
    """Runs a bug's program as one rank, and reports how it ended."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(bug.ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's log
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=TIMEOUT)
    try:
        value = bug.program()
    except BaseException as error:
        writer.send(f"{type(error).__name__}: {error}")
    else:
        writer.send("returns" if value is None else f"returns {value}")
    writer.close()
    os._exit(0)


def joined(outcomes: list[Outcome]) -> str:
    """Returns the ends of all ranks in one line, ranks with the same end together."""
    ends: dict[str, list[str]] = {}
    for rank, outcome in enumerate(outcomes):
        text = condensed(outcome.text)
        if TIMEOUT <= outcome.seconds < DEADLINE:
            text = f"after its timeout {text}"
        ends.setdefault(text, []).append(str(rank))
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {text}" if len(ends) > 1 else f"every rank {text}"
        for text, ranks in ends.items()
    )


def condensed(text: str) -> str:
    """Returns a message of torch as one line without ports, source paths, hints and stacks of C++."""
    text = re.split(r"\nException raised from|\nframe #|\.? ?This (?:may indicate|is typically)", text)[0]
    text = re.sub(r"\[[^\]]*/gloo/[^\]]*\] ?|\[[\d.]+\]:\d+", "", text)
    # It depends on timing which of the two comes, and whether Gloo has begun to read.
    text = text.replace("Read error : Connection reset by peer", "Connection closed by peer")
    return re.sub(r"\s+", " ", text).strip()


def in_short(found: str) -> str:
    """Returns what a simulation says as one line, without folders, source texts and remedies."""
    found = re.sub(r"\S*/(field_bugs\.py:\d+)(: [^\n]*?# at: [\d ]*\d)?", r"\1", found)
    first, *lines = found.replace("no rank can go on at 0 s: ", "").splitlines()
    # The remedy comes after the last colon. A wait for a store has none.
    head, _, remedy = first.rpartition(": ")
    text = first if remedy.startswith("no other rank") else head
    return "; ".join([text, *(line.strip() for line in lines)])


if __name__ == "__main__":
    main()
