"""How fast are messages and all-reduces over TCP, beside Gloo and a bare socket loop?

    python benchmarks/tcp/run.py                       # everything, about a minute and a half
    python benchmarks/tcp/run.py --only all_reduce --ranks 4 --sizes 8 65536

Every contestant has processes of its own, which sleep while another's are measured. In every round each contestant
takes one turn per question, in changing order; a turn is many repetitions behind one another, and counts as their mean,
of the slowest rank. The table shows medians over rounds, and of the ratios of each round.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from echelon import ProcessGroup
from echelon.backends.tcp.backend import TcpBackend

sys.path.append(str(Path(__file__).parents[1]))
from harness import options_of, print_environment, print_head, print_row, ratio

ONE_WAY_SIZES = (1 << 20, 64 << 20)
REDUCED_SIZES = (8, 64 << 10, 1 << 20, 64 << 20)


class Where(NamedTuple):
    """Rank and rendezvous of a process of a contestant."""

    rank: int
    world_size: int
    port: int
    folder: str


class Contestant(NamedTuple):
    """One rank of a library that is measured. Messages go between ranks 0 and 1."""

    send: Callable[[torch.Tensor], object]
    recv: Callable[[torch.Tensor], object]
    all_reduce: Callable[[torch.Tensor], object]
    close: Callable[[], object]


def echelon(where: Where) -> Contestant:
    address = f"127.0.0.1:{where.port}"
    group = ProcessGroup(TcpBackend(where.rank, where.world_size, address, secret=b"of a benchmark"))
    other = 1 - where.rank
    return Contestant(
        lambda tensor: group.send(tensor, other),
        lambda tensor: group.recv(other, out=tensor),
        group.all_reduce,
        group.close,
    )


def gloo(where: Where) -> Contestant:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{where.folder}/gloo"
    torch.distributed.init_process_group("gloo", init_method=store, rank=where.rank, world_size=where.world_size)
    other = 1 - where.rank
    return Contestant(
        lambda tensor: torch.distributed.send(tensor, other),
        lambda tensor: torch.distributed.recv(tensor, other),
        torch.distributed.all_reduce,
        torch.distributed.destroy_process_group,
    )


def bare_socket(where: Where) -> Contestant:
    """sendall and recv_into on one blocking socket."""
    path = os.path.join(where.folder, "socket")
    if where.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            with open(f"{path}.new", "w") as file:
                file.write(str(listener.getsockname()[1]))
            os.rename(f"{path}.new", path)  # whole at once, so that the other never reads half a number
            sock, _ = listener.accept()
    else:
        while not os.path.exists(path):
            time.sleep(0.01)
        with open(path) as file:
            sock = socket.create_connection(("127.0.0.1", int(file.read())))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def recv(tensor: torch.Tensor) -> None:
        view = memoryview(tensor.numpy()).cast("B")
        while view.nbytes:
            view = view[sock.recv_into(view) :]

    return Contestant(lambda tensor: sock.sendall(tensor.numpy()), recv, torch.neg, sock.close)


def measure(contestant: Contestant, question: str, is_sender: bool, num_bytes: int, repetitions: int) -> float:
    """Returns the seconds of a message with an answer of 8 bytes, of one in a stream, or of an all-reduce."""
    tensor, answer = torch.zeros(num_bytes // 4), torch.zeros(2)
    there, back = (contestant.send, contestant.recv) if is_sender else (contestant.recv, contestant.send)

    def exchange() -> None:
        there(tensor)
        back(answer)

    acts = {"message": exchange, "stream": lambda: there(tensor), "all_reduce": lambda: contestant.all_reduce(tensor)}
    act = acts[question]
    if question != "stream":
        act()  # the first opens connections and maps memory
    begin = time.perf_counter()
    for _ in range(repetitions):
        act()
    if question == "stream":
        back(answer)  # one answer to the last
    return (time.perf_counter() - begin) / repetitions


CONTESTANTS = {"Echelon": echelon, "Gloo": gloo, "socket": bare_socket}


def serve(name: str, where: Where, commands: Connection) -> None:
    """Runs one process of a contestant: answers questions until it gets None."""
    torch.set_num_threads(1)
    contestant = CONTESTANTS[name](where)
    commands.send("ready")
    while (command := commands.recv()) is not None:
        question, num_bytes, repetitions = command
        commands.send(measure(contestant, question, where.rank == 0, num_bytes, repetitions))
    contestant.close()


class Team:
    """The processes of one contestant."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        for pipe in pipes:
            pipe.recv()

    def ask(self, question: str, num_bytes: int, repetitions: int) -> float:
        """Returns the seconds per repetition, of the slowest rank."""
        for pipe in self._pipes:
            pipe.send((question, num_bytes, repetitions))
        return max(pipe.recv() for pipe in self._pipes)


@contextlib.contextmanager
def team(name: str, world_size: int) -> Iterator[Team]:
    """Starts the processes of a contestant, and ends them."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        holder = stack.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            where = Where(rank, world_size, holder.getsockname()[1], folder)
            processes.append(context.Process(target=serve, args=(name, where, theirs), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        try:
            yield Team(pipes)
            for pipe in pipes:
                pipe.send(None)
        finally:
            for process in processes:
                process.join(2)
                process.kill()


def compare(teams: dict[str, Team], ranks: int, question: str, num_bytes: int, options: argparse.Namespace) -> None:
    """Asks all teams in turns and prints the line of the table."""
    names = list(teams)
    slowest = max(found.ask(question, num_bytes, 1) for found in teams.values())
    repetitions = max(1, min(2000, int(options.seconds / slowest)))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(teams[name].ask(question, num_bytes, repetitions))
    padding = ["-"] * (len(CONTESTANTS) - len(names))
    medians = (f"{statistics.median(taken) * 1e6:.1f}" for taken in seconds.values())
    ratios = (f"{ratio(seconds['Echelon'], seconds[name]):.2f}" for name in names[1:])
    print_row(ranks, question, num_bytes, *medians, *padding, *ratios, *padding, repetitions)


def main() -> None:
    parser = options_of(__doc__, rounds=15)
    parser.add_argument("--only", choices=("message", "stream", "all_reduce"), help="one kind of question")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="for all_reduce")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes")
    parser.add_argument("--seconds", type=float, default=0.06, help="about how long a turn takes")
    options = parser.parse_args()
    print_environment(f"1 thread a rank, medians of {options.rounds} rounds")
    print_head(
        "ranks | question | bytes | Echelon us | Gloo us | socket us | Echelon/Gloo | Echelon/socket | repetitions"
    )
    if options.only != "all_reduce":
        with contextlib.ExitStack() as stack:
            teams = {name: stack.enter_context(team(name, 2)) for name in CONTESTANTS}
            for question in ("message", "stream"):
                if options.only in (None, question):
                    for size in options.sizes or ((8,) if question == "message" else ()) + ONE_WAY_SIZES:
                        compare(teams, 2, question, size, options)
    if options.only in (None, "all_reduce"):
        for ranks in options.ranks:
            with contextlib.ExitStack() as stack:
                teams = {name: stack.enter_context(team(name, ranks)) for name in ("Echelon", "Gloo")}
                for size in options.sizes or REDUCED_SIZES:
                    compare(teams, ranks, "all_reduce", size, options)


if __name__ == "__main__":
    main()
