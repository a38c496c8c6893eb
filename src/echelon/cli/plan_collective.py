"""`echelon plan all-reduce`: steps and cost of a collective algorithm, without running it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import starmap
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from echelon.bench.request import read_size
from echelon.cli.amounts import one_number, read_hosts
from echelon.cli.plan_report import Files, exact, print_table, write
from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of, build, chunk_bytes, numbered
from echelon.collectives.plans.check import check, goal_of
from echelon.collectives.plans.cost import LinkCosts, simulate
from echelon.collectives.plans.draw import grid, legend
from echelon.collectives.plans.plan import Plan, Send, text_of_round
from echelon.collectives.plans.select import choose, variable_of
from echelon.errors import PlanError
from echelon.timeline.timeline import Timeline
from echelon.wording import counted

_MOST_ROWS = 64  # ranks in the table; a terminal shows no more at a time
_MOST_RANKS = 1024
"""More ranks are a slip of the keyboard, or take longer than anybody waits."""
_FLAGS = ("--json", "--compare", "--search", "--help", "-h")
"""Options without a value, of both `echelon plan` commands."""


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Whether a command line plans a collective, not a pipeline schedule."""
    return arguments[:1] == ["plan"] and _operation(_first_of(arguments[1:])) in OPERATIONS


def _first_of(words: Sequence[str]) -> str:
    """Returns the first word that is neither an option nor an option's value. Empty if there is none."""
    is_value = False
    for word in words:
        if not is_value and not word.startswith("-"):
            return word
        is_value = word.startswith("-") and "=" not in word and word not in _FLAGS
    return ""


def plan_collective(
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="A collective, such as all-reduce.")],
    algorithm: Annotated[str | None, typer.Option(help="Algorithm to plan.  [default: list all]")] = None,
    num_ranks: Annotated[int | None, typer.Option("-r", "--num-ranks", help="Number of ranks.")] = None,
    root: Annotated[int, typer.Option(help="Source of a broadcast or scatter, destination of a reduce or gather.")] = 0,
    hosts: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="Host of each rank: a,a,b,b, or 2x2 (2 hosts of 2 ranks).")
    ] = None,
    num_bytes: Annotated[str, typer.Option("--bytes", metavar="BYTES", help="Size of the whole tensor.")] = "1M",
    alpha: Annotated[str, typer.Option(metavar="SECONDS", help="Latency per message.")] = "1e-5",
    beta: Annotated[str, typer.Option(metavar="SECONDS", help="Transfer time per byte.")] = "1e-9",
    gamma: Annotated[str, typer.Option(metavar="SECONDS", help="Reduction time per byte.")] = "1e-10",
    local_alpha: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Latency inside a host.  [default: alpha]")
    ] = None,
    local_beta: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Transfer time per byte inside a host.  [default: beta]")
    ] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw it as SVG.")] = None,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Draw it as PNG.")] = None,
    chrome: Annotated[str | None, typer.Option(metavar="FILE", help="Write it as a Chrome trace (Perfetto).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Checks, times and draws one algorithm of a collective, or lists and compares all.

    A message of b bytes takes alpha + b beta. A reduction of b bytes takes b gamma.
    """
    operation = _operation(operation)
    size = read_size("--bytes", num_bytes)
    files = Files(svg, png, chrome, None)
    files.check(compare=False)
    if num_ranks is not None and num_ranks > _MOST_RANKS:
        raise PlanError(f"-r {num_ranks} is too many: give at most {_MOST_RANKS}")
    names = None if hosts is None else read_hosts(hosts, num_ranks)
    costs = LinkCosts(
        alpha=one_number("--alpha", alpha),
        beta=one_number("--beta", beta),
        gamma=one_number("--gamma", gamma),
        hosts=names,
        local_alpha=None if local_alpha is None else one_number("--local-alpha", local_alpha),
        local_beta=None if local_beta is None else one_number("--local-beta", local_beta),
    )
    console = Console(highlight=False)
    if algorithm is None:
        _refuse_files(svg, png, chrome)
        rows = _list(operation, num_ranks, root, size, costs)
        print(json.dumps(rows, indent=2)) if as_json else _print_list(console, operation, rows)
        return
    name = _operation(algorithm)
    if num_ranks is None:
        raise PlanError("-r is missing: give the number of ranks, as -r 4")
    plan = build(operation, name, num_ranks, root, names)
    check(plan, goal_of(operation, plan, root))
    timeline = simulate(plan, chunk_bytes(operation, plan, size), costs)
    found = _Found(operation, name, plan, size, timeline)
    written = _write_files(timeline, svg, png, chrome)
    if as_json:
        print(json.dumps({**_as_values(found), "files": written}, indent=2))
        return
    _print_plan(console, found)
    for path in written:
        write(console, Text(f"wrote {path}"))


class _Found(NamedTuple):
    """Plan of a collective with its simulated timeline."""

    operation: str
    algorithm: str
    plan: Plan
    num_bytes: int
    timeline: Timeline

    def bytes_sent(self, rank: int) -> float:
        size = chunk_bytes(self.operation, self.plan, self.num_bytes)
        return float(sum(len(step.chunks) for step in self.sends(rank)) * size)

    def sends(self, rank: int) -> list[Send]:
        return [step for steps in self.plan.rounds[rank] for step in steps if isinstance(step, Send)]


def _operation(word: str) -> str:
    return word.replace("-", "_")


def _refuse_files(*paths: str | None) -> None:
    for path in paths:
        if path is not None:
            raise PlanError(f"{path}: there are several plans to draw; name one, as --algorithm ring -r 4")


def _list(operation: str, num_ranks: int | None, root: int, num_bytes: int, costs: LinkCosts) -> list[dict[str, Any]]:
    """Returns a row per algorithm, with its time if the number of ranks is known.

    Algorithms that need the hosts of the ranks are left out if the hosts are not known.
    """
    rows = []
    for algorithm in algorithms_of(operation):
        row: dict[str, Any] = {"algorithm": algorithm.name, "rounds": algorithm.rounds, "cost": algorithm.cost}
        if num_ranks is not None:
            if algorithm.goes_by_hosts and costs.hosts is None:
                continue
            plan = build(operation, algorithm.name, num_ranks, root, costs.hosts)
            makespan = simulate(plan, chunk_bytes(operation, plan, num_bytes), costs).makespan
            hosts = numbered(costs.hosts or range(num_ranks))
            is_chosen = choose(operation, num_bytes, hosts) == algorithm.name
            row = {**row, "rounds": plan.num_rounds, "seconds": exact(makespan), "chosen": is_chosen}
        rows.append(row)
    return rows


def _print_list(console: Console, operation: str, rows: list[dict[str, Any]]) -> None:
    hosts = "; h hosts of k ranks" if any(row["cost"].count("lg(h)") for row in rows) else ""
    write(console, Text(f"{operation}: p ranks, n bytes{hosts}", style="bold"))
    timed = "seconds" in rows[0]
    titles = ["algorithm", "rounds", *(["time", "chosen"] if timed else []), "cost"]
    table = [titles]
    for row in rows:
        times = [_duration(row["seconds"]), "yes" if row["chosen"] else ""] if timed else []
        table.append([row["algorithm"], str(row["rounds"]), *times, row["cost"]])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for index, cells in enumerate(table):
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        write(console, Text(line.rstrip(), style="bold" if index == 0 else ""))
    write(console, Text(f"\n{variable_of(operation)}=NAME makes a group take another one"))


def _print_plan(console: Console, found: _Found) -> None:
    plan, timeline = found.plan, found.timeline
    num_bytes = 0 if found.operation == "barrier" else found.num_bytes
    sizes = ((plan.num_ranks, "rank"), (plan.num_chunks, "chunk"), (num_bytes, "byte"))
    write(console, Text(f"{plan.name}: {', '.join(starmap(counted, sizes))}", style="bold"))
    write(console, Text(f"simulated: {counted(plan.num_rounds, 'round')}, {_duration(timeline.makespan)}\n"))
    if plan.num_rounds:
        write(console, Text(f"{grid(plan, console.width)}\n\n{legend(plan)}\n"))
    rows: list[Sequence[str]] = [("rank", "messages", "bytes sent", "busy", "idle")]
    for rank in range(min(plan.num_ranks, _MOST_ROWS)):
        busy = timeline.busy[rank]
        times = (_duration(busy), _duration(timeline.makespan - busy))
        rows.append((str(rank), str(len(found.sends(rank))), f"{found.bytes_sent(rank):.12g}", *times))
    print_table(console, rows)


def _as_values(found: _Found) -> dict[str, Any]:
    plan, timeline = found.plan, found.timeline
    return {
        "operation": found.operation,
        "algorithm": found.algorithm,
        "num_ranks": plan.num_ranks,
        "num_chunks": plan.num_chunks,
        "num_rounds": plan.num_rounds,
        "bytes": found.num_bytes,
        "seconds": exact(timeline.makespan),
        "ranks": [
            {
                "rank": rank,
                "messages": len(found.sends(rank)),
                "bytes_sent": exact(found.bytes_sent(rank)),
                "busy": exact(timeline.busy[rank]),
                "rounds": list(map(text_of_round, plan.rounds[rank])),
            }
            for rank in range(plan.num_ranks)
        ],
    }


def _duration(seconds: Any) -> str:
    value = float(seconds)
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.4g} {unit}"
    return f"{value * 1e6:.4g} us"


def _write_files(timeline: Timeline, svg: str | None, png: str | None, chrome: str | None) -> list[str]:
    written: list[str] = []
    for path, draw in ((svg, timeline.draw), (png, timeline.draw), (chrome, timeline.to_chrome)):
        if path is not None:
            draw(path)
            written.append(path)
    return written
