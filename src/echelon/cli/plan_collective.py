"""`echelon plan all-reduce`: steps and cost of a collective algorithm, without running it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Annotated, Any

import typer
from rich.console import Console

from echelon.bench.request import read_hosts, read_size
from echelon.cli.options import Chrome, Html, Json, Png, Svg, check_files, files_of, given, one_number, value
from echelon.cli.output import exact, has_width, print_table, rich_console, to_json, write, write_files
from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of, build, chunk_bytes, numbered
from echelon.collectives.plans.check import check, goal_of
from echelon.collectives.plans.cost import LinkCosts, simulate
from echelon.collectives.plans.plan import Plan, Send, grid, legend, text_of_round
from echelon.collectives.plans.select import choose, variable_of
from echelon.errors import PlanError
from echelon.timeline.timeline import Timeline
from echelon.wording import counted

_MOST_ROWS = 64  # ranks in the table; a terminal shows no more at a time
# Options without a value, of both `echelon plan` commands. After any other option, the next word is its value.
_FLAGS = ("--json", "--compare", "--search", "--help", "-h")


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


@dataclass(frozen=True)
class CollectiveOptions:
    """Options of `echelon plan` for a collective, as they were given."""

    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="A collective, such as all-reduce.")]
    algorithm: Annotated[str | None, typer.Option(metavar="NAME", help="Algorithm to plan.  [default: list all]")] = (
        None
    )
    # More ranks are a slip of the keyboard, or take longer than anybody waits.
    num_ranks: Annotated[
        int | None, typer.Option("-r", "-n", "--num-ranks", metavar="COUNT", min=1, max=1024, help="Number of ranks.")
    ] = None
    root: Annotated[
        int, typer.Option(metavar="RANK", help="Source of a broadcast or scatter, destination of a reduce or gather.")
    ] = 0
    hosts: Annotated[
        str | None,
        value("HOSTS", "Hosts: 2x4 (2 hosts of 4 ranks), their number, ranks of each (4,4), or names (a,a,b,b)."),
    ] = None
    num_bytes: Annotated[str, typer.Option("--bytes", metavar="BYTES", help="Size of the whole tensor.")] = "1M"
    alpha: Annotated[str, value("SECONDS", "Latency per message.")] = "1e-5"
    beta: Annotated[str, value("SECONDS", "Transfer time per byte.")] = "1e-9"
    gamma: Annotated[str, value("SECONDS", "Reduction time per byte.")] = "1e-10"
    local_alpha: Annotated[str | None, value("SECONDS", "Latency inside a host.  [default: alpha]")] = None
    local_beta: Annotated[str | None, value("SECONDS", "Transfer time per byte inside a host.  [default: beta]")] = None
    svg: Svg = None
    png: Png = None
    html: Html = None
    chrome: Chrome = None
    as_json: Json = False

    def costs(self) -> LinkCosts:
        """Returns the costs of messages and reductions.

        Raises:
            ScheduleError: a value is not a number.
            PlanError: hosts for another number of ranks.
        """
        hosts = None if self.hosts is None else read_hosts(self.hosts, self.num_ranks)
        return LinkCosts(
            hosts=hosts, **given(self, ("alpha", "beta", "gamma", "local_alpha", "local_beta"), one_number)
        )


def plan_collective(options: CollectiveOptions) -> None:
    """Checks, times and draws one algorithm of a collective, or lists and compares all.

    A message of b bytes takes alpha + b beta. A reduction of b bytes takes b gamma.
    """
    operation = _operation(options.operation)
    size = read_size("--bytes", options.num_bytes)
    check_files(options)
    costs = options.costs()  # a wrong cost is an error even where only names are listed
    console = rich_console()
    if options.algorithm is None:
        for option, path in files_of(options).items():
            raise PlanError(f"{option} {path}: there are several plans to draw; name one, as --algorithm ring -r 4")
        rows = _list(operation, options.num_ranks, options.root, size, costs)
        if options.as_json:
            print(to_json({"operation": operation, "num_ranks": options.num_ranks, "bytes": size, "algorithms": rows}))
        else:
            _print_list(console, operation, rows)
        return
    if options.num_ranks is None:
        raise PlanError("-r is missing: give the number of ranks, as -r 4")
    name = _operation(options.algorithm)
    plan = build(operation, name, options.num_ranks, options.root, costs.hosts)
    # Checked though it is ours: the command shows that the plan reaches its goal.
    check(plan, goal_of(operation, plan, options.root))
    timeline = simulate(plan, chunk_bytes(operation, plan, size), costs)
    values = _as_values(operation, plan, size, timeline)
    written = write_files(
        *((path, timeline.draw) for path in (options.svg, options.png, options.html)),
        (options.chrome, timeline.to_chrome),
    )
    if options.as_json:
        sizes = {"operation": operation, "algorithm": name, "bytes": size}
        print(to_json({**sizes, **values, "files": written}))
        return
    _print_plan(console, plan, 0 if operation == "barrier" else size, values)
    for path in written:
        write(console, f"wrote {path}")


def _operation(word: str) -> str:
    return word.replace("-", "_")


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
            # The static table's choice: a tuned table is of other ranks and hosts than the planned ones.
            is_chosen = choose(operation, num_bytes, hosts) == algorithm.name
            row = {**row, "rounds": plan.num_rounds, "seconds": exact(makespan), "chosen": is_chosen}
        rows.append(row)
    return rows


def _print_list(console: Console, operation: str, rows: list[dict[str, Any]]) -> None:
    # Only hierarchical algorithms have h and k in their formulas.
    hosts = "; h hosts of k ranks" if any(row["cost"].count("lg(h)") for row in rows) else ""
    write(console, f"{operation}: p ranks, n bytes{hosts}", style="bold")
    timed = "seconds" in rows[0]
    table = [("algorithm", "rounds", *(("time", "chosen") if timed else ()), "cost")]
    for row in rows:
        times = (_duration(row["seconds"]), "yes" if row["chosen"] else "") if timed else ()
        table.append((row["algorithm"], str(row["rounds"]), *times, row["cost"]))
    print_table(console, table, left=range(len(table[0])))
    write(console, f"\n{variable_of(operation)}=NAME selects another algorithm")


def _print_plan(console: Console, plan: Plan, num_bytes: int, values: dict[str, Any]) -> None:
    sizes = ((plan.num_ranks, "rank"), (plan.num_chunks, "chunk"), (num_bytes, "byte"))
    write(console, f"{plan.name}: {', '.join(starmap(counted, sizes))}", style="bold")
    write(console, f"simulated: {counted(plan.num_rounds, 'round')}, {_duration(values['seconds'])}\n")
    if plan.num_rounds:
        signs = textwrap.fill(legend(plan), console.width) if has_width(console) else legend(plan)
        write(console, f"{grid(plan, console.width)}\n\n{signs}\n")
    rows: list[Sequence[str]] = [("rank", "messages", "bytes sent", "busy", "idle")]
    for rank in values["ranks"][:_MOST_ROWS]:
        times = (_duration(rank["busy"]), _duration(values["seconds"] - rank["busy"]))
        rows.append((str(rank["rank"]), str(rank["messages"]), f"{rank['bytes_sent']:.12g}", *times))
    print_table(console, rows)


def _as_values(operation: str, plan: Plan, num_bytes: int, timeline: Timeline) -> dict[str, Any]:
    size = chunk_bytes(operation, plan, num_bytes)
    sends = [[step for steps in rank for step in steps if isinstance(step, Send)] for rank in plan.rounds]
    return {
        "num_ranks": plan.num_ranks,
        "num_chunks": plan.num_chunks,
        "num_rounds": plan.num_rounds,
        "seconds": exact(timeline.makespan),
        "ranks": [
            {
                "rank": rank,
                "messages": len(sends[rank]),
                "bytes_sent": exact(float(sum(len(step.chunks) for step in sends[rank]) * size)),
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
