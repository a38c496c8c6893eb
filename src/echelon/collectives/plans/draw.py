"""Picture of a plan as a grid of text: a row per rank, a column per round."""

from __future__ import annotations

from echelon.collectives.plans.plan import Plan, text_of_round

# More rows are of no use on a terminal.
_MOST_RANKS = 64


def grid(plan: Plan, width: int | None = None) -> str:
    """Returns the steps of every rank in the text form of `echelon.collectives.plans.plan`, as a grid.

    Rounds line up by number, not by time: two ranks can be in different rounds at the same time.

    Args:
        plan: The plan.
        width: Width in characters. Rounds that do not fit are counted instead. None: no limit.
    """
    num_rounds = max(map(len, plan.rounds), default=0)
    shown = plan.rounds[:_MOST_RANKS]
    titles = ["", *(f"rank {rank}" for rank in range(len(shown)))]
    lines = [title.ljust(max(map(len, titles))) for title in titles]
    drawn = 0
    for number in range(num_rounds):
        cells = [str(number), *(text_of_round(program[number]) if number < len(program) else "" for program in shown)]
        cell_width = max(map(len, cells))
        # The first round is always drawn, even if it is too wide.
        if width is not None and drawn and len(lines[0]) + 2 + cell_width > width:
            break
        lines = [f"{line}  {cell.ljust(cell_width)}" for line, cell in zip(lines, cells, strict=True)]
        drawn += 1
    left_out = [
        f"{count} more {what}{'s' if count > 1 else ''}"
        for count, what in ((num_rounds - drawn, "round"), (plan.num_ranks - len(shown), "rank"))
        if count
    ]
    notes = [f"({' and '.join(left_out)})"] if left_out else []
    return "\n".join([line.rstrip() for line in lines] + notes)


def legend(plan: Plan) -> str:
    """Returns the meanings of the signs that occur in the steps of a plan, in one line."""
    steps = {sign for program in plan.rounds for steps in program for step in steps for sign in _signs(str(step))}
    return "   ".join(f"{example} {meaning}" for sign, (example, meaning) in _MEANINGS.items() if sign in steps)


_MEANINGS = {
    ">": ("0>1", "sends chunk 0 to rank 1"),
    "<": ("0<1", "receives it from rank 1"),
    "+<": ("+0<1", "combines: own, received"),
    "<+": ("0<1+", "combines: received, own"),
    "=": ("4=0", "copies chunk 0 as 4"),
}


def _signs(step: str) -> list[str]:
    return ["".join(character for character in step if character in "><+=")]
