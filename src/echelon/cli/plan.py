"""`echelon plan`: cost and picture of a pipeline schedule, without running it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from echelon.cli.amounts import costs
from echelon.cli.plan_compare import Memory, compare_schedules
from echelon.cli.plan_report import Files, as_tried, as_values, in_words, print_plan, to_json, write
from echelon.cli.plan_request import Request, check_limit
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.schedules.recommendation import held_microbatches
from echelon.timeline.timeline import Time


def plan(
    schedule: Annotated[
        str | None, typer.Argument(metavar="SCHEDULE", help="A name such as 1f1b, or a .csv file.")
    ] = None,
    num_ranks: Annotated[int | None, typer.Option("-r", "--num-ranks", help="Number of ranks.")] = None,
    num_microbatches: Annotated[
        int | None, typer.Option("-m", "--num-microbatches", help="Number of microbatches per step.")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Virtual stages per rank.  [default: the fewest; --search: 1 and 2]")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Microbatches per turn of a chunk (interleaved-1f1b).")] = None,
    forward: Annotated[
        str | None, typer.Option(metavar="TIME", help="Duration of a forward (F).  [default: 1]")
    ] = None,
    backward_input: Annotated[
        str | None, typer.Option(metavar="TIME", help="Duration of an input gradient (I).  [default: 1]")
    ] = None,
    backward_weight: Annotated[
        str | None, typer.Option(metavar="TIME", help="Duration of a weight gradient (W).  [default: 1]")
    ] = None,
    transfer: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Duration of a transfer between ranks; one, or one per boundary.  [default: 0]"
        ),
    ] = None,
    overlapped: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Duration of an overlapped forward and backward.  [default: their sum]"),
    ] = None,
    recompute: Annotated[
        str | None, typer.Option(metavar="TIME", help="Duration of recomputation before a backward.  [default: 0]")
    ] = None,
    activation: Annotated[
        str | None, typer.Option(metavar="MEMORY", help="Activations held from forward to backward.  [default: 1]")
    ] = None,
    weight_activation: Annotated[
        str | None,
        typer.Option(metavar="MEMORY", help="Part of the activations kept until W.  [default: all]"),
    ] = None,
    recomputed_activation: Annotated[
        str | None, typer.Option(metavar="MEMORY", help="Activations restored by recomputation.  [default: 0]")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="N", help="Most microbatches whose activations a rank may hold.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare all schedules.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Search for the fastest schedule.")] = False,
    parameters: Annotated[
        str | None,
        typer.Option(metavar="MEMORY", help="With --compare: parameter memory per rank.  [default: 0]"),
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(metavar="MEMORY", help="With --compare: total memory of a rank.")
    ] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw it as SVG.")] = None,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Draw it as PNG.")] = None,
    chrome: Annotated[str | None, typer.Option(metavar="FILE", help="Write it as a Chrome trace (Perfetto).")] = None,
    csv: Annotated[str | None, typer.Option(metavar="FILE", help="Write the orders as torch reads them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Checks, times and draws a pipeline schedule. For a collective: echelon plan all-reduce --help.

    Times and memory are in any unit. Give one number for all stages, or one per stage, as --forward 1,1,2,1.
    4 ranks with 2 chunks have 8 stages.
    """
    request = Request(schedule, num_ranks, num_microbatches, chunks, group_size, search, compare)
    request.check()
    memory = Memory(memory_limit, parameters, capacity)
    memory.check(compare)
    files = Files(svg, png, chrome, csv)
    files.check(compare)
    stage_costs = costs(
        {
            "forward": forward,
            "backward_input": backward_input,
            "backward_weight": backward_weight,
            "transfer": transfer,
            "overlapped": overlapped,
            "recompute": recompute,
            "activation": activation,
            "weight_activation": weight_activation,
            "recomputed_activation": recomputed_activation,
        }
    )
    console = Console(highlight=False)
    if compare:
        compare_schedules(console, request, stage_costs, memory, as_json)
    else:
        _plan_one(console, request, stage_costs, memory.limit, files, as_json)


def _plan_one(
    console: Console, request: Request, stage_costs: Costs, limit: Time | None, files: Files, as_json: bool
) -> None:
    found, stage_costs, searched = request.make(stage_costs, limit)
    timeline = found.simulate(stage_costs)
    held = held_microbatches(found, stage_costs, timeline)
    check_limit(found, held, limit)
    written = files.write(found, timeline)
    if as_json:
        tried = {"searched": [as_tried(option) for option in searched]} if searched else {}
        print(to_json({**as_values(found, timeline, held), **tried, "files": written}))
        return
    print_plan(console, found, timeline, held)
    if searched:
        write(console, Text(f"\n{in_words(searched)}"))
    for path in written:
        write(console, Text(f"wrote {path}"))
