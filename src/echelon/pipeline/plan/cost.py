"""Costs of a stage's work in time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from numbers import Rational
from typing import Literal, NamedTuple, TypeAlias, get_args

from echelon.arguments import is_number, named, refuse_others
from echelon.errors import InvalidArgument, ScheduleError
from echelon.timeline.timeline import Time, Unit

Amount: TypeAlias = Time | Sequence[Time]
"""One number for all stages, or a sequence with one per stage."""
CostMemoryUnit: TypeAlias = Literal["", "B"]
"""Unit of a plan's memory: bytes, or that of `Costs.activation`."""


def transfer_time(num_bytes: Time, latency: Time, bandwidth: Time) -> Time:
    """Returns the time of one microbatch's bytes across a boundary: latency + num_bytes / bandwidth.

    Pass one result, or one per boundary, as `Costs(transfer=...)`.

    Args:
        num_bytes: bytes of one microbatch at the boundary.
        latency: time of an empty message, in the unit of the costs.
        bandwidth: bytes per unit of time, above 0.

    Raises:
        ScheduleError: a size or latency below 0, or a bandwidth that is not above 0.
    """
    _validate("num_bytes", num_bytes)
    _validate("latency", latency)
    _validate("bandwidth", bandwidth)
    if not bandwidth:
        raise ScheduleError("bandwidth is 0: nothing would ever arrive; give bytes per unit of time, such as 1e9")
    # Keeps ints exact, which / would not.
    if isinstance(num_bytes, int) and isinstance(bandwidth, int):
        return latency + Fraction(num_bytes, bandwidth)
    return latency + num_bytes / bandwidth


class StageCosts(NamedTuple):
    """`Costs` as tuples with one number per stage (`transfer`: one per boundary)."""

    forward: tuple[Time, ...]
    backward_input: tuple[Time, ...]
    backward_weight: tuple[Time, ...]
    backward: tuple[Time, ...]
    """Time of the fused backward."""
    transfer: tuple[Time, ...]
    """Boundary b lies between stages b and b + 1. The int 0 if one rank holds both stages, or for 0.0: adding a float
    of 0 would turn exact times into floats."""
    overlapped: tuple[Time, ...] | None
    """Time of a forward of this stage overlapped with a fused backward of another. None: the sum of the two."""
    activation: tuple[Time, ...]
    weight_activation: tuple[Time, ...]
    recomputed_activation: tuple[Time, ...]


@refuse_others(
    backward=" give backward_input and backward_weight, whose sum it is",
    communication="transfer",
    memory="activation",
)
@dataclass(frozen=True)
class Costs:
    """Costs of stages, in any unit of time and of memory. Each is one number, or a sequence with one per stage.

    A stage is one chunk: 4 ranks x 2 chunks have 8 stages. Ints and Fractions give exact results.

    Args:
        forward: Time of F.
        backward_input: Time of I. The fused B takes backward_input + backward_weight.
        backward_weight: Time of W.
        transfer: Time from the end of a stage until its neighbour on another rank has the data, the same forward and
            backward. One number, or one per boundary (num_stages - 1). See `transfer_time`.
        activation: Memory held from the start of F to the end of the backward.
        weight_activation: Part of `activation` held from the end of I to the end of W. None: all of it.
        overlapped: Time of a forward and a fused backward that run as one step, by the forward's stage. None: the sum
            of the two.
        recompute: Additional time of I and B, to run the forward again. `activation` is then the memory held between
            the two forwards: the stage's input.
        recomputed_activation: Additional memory from the start of I or B to the end of the backward, which the
            recomputation brings back.
        unit: Unit of all times: "s" for seconds. "": not known; pictures then count in units of the plan.
        memory_unit: Unit of all memory: "B" for bytes. "": not known; pictures then count in units of `activation`.

    Raises:
        ScheduleError: a cost that is not a finite number of at least 0, or another unit.
    """

    forward: Amount = 1.0
    backward_input: Amount = 1.0
    backward_weight: Amount = 1.0
    transfer: Amount = 0.0
    activation: Amount = 1.0
    weight_activation: Amount | None = None
    overlapped: Amount | None = None
    recompute: Amount = 0
    recomputed_activation: Amount = 0
    # Not compared, as those of a Timeline: equal costs make equal plans.
    unit: Unit = field(default="", kw_only=True, compare=False)
    memory_unit: CostMemoryUnit = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        # Every sequence becomes a tuple: `num_stages` and `_spread` tell sequences from numbers by that type.
        for name in amount_names():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
                object.__setattr__(self, name, value)
            for number in value if isinstance(value, tuple) else (value,):
                _validate(name, number)
        for name, unit, known in (("unit", self.unit, Unit), ("memory_unit", self.memory_unit, CostMemoryUnit)):
            if unit not in get_args(known):
                choices = " or ".join(f'"{each}"' for each in reversed(get_args(known)))
                raise ScheduleError(f"{name}={unit!r}: give {choices} (not known)")

    @property
    def num_stages(self) -> int | None:
        """Number of stages that the sequences are for. None if there is no sequence."""
        for name in amount_names():
            value = getattr(self, name)
            if isinstance(value, tuple):
                return len(value) + (name == "transfer")
        return None

    def per_stage(self, placement: Sequence[int]) -> StageCosts:
        """Returns the costs of each stage of a placement (the rank of each stage).

        Raises:
            ScheduleError: a sequence whose length is not the number of stages (of boundaries, for `transfer`).
        """
        count = len(placement)
        transfer = _spread("transfer", self.transfer, count - 1, "boundaries between stages")
        activation = _spread("activation", self.activation, count)
        recomputed = _spread("recomputed_activation", self.recomputed_activation, count)
        return_all = tuple(map(_add, activation, recomputed))
        recompute = _spread("recompute", self.recompute, count)
        weight = _spread("backward_weight", self.backward_weight, count)
        for_input = tuple(map(_add, _spread("backward_input", self.backward_input, count), recompute))
        return StageCosts(
            forward=_spread("forward", self.forward, count),
            backward_input=for_input,
            backward_weight=weight,
            backward=tuple(map(_add, for_input, weight)),
            transfer=tuple(
                time if time and placement[left] != placement[left + 1] else 0 for left, time in enumerate(transfer)
            ),
            overlapped=None if self.overlapped is None else _spread("overlapped", self.overlapped, count),
            activation=activation,
            weight_activation=(
                return_all
                if self.weight_activation is None
                else _spread("weight_activation", self.weight_activation, count)
            ),
            recomputed_activation=recomputed,
        )


def amount_names() -> tuple[str, ...]:
    """Returns the names of all costs: every field of `Costs` but its units."""
    return tuple(each.name for each in fields(Costs) if not each.kw_only)


# Their None has a meaning.
_OPTIONAL = ("weight_activation", "overlapped")


def _add(left: Time, right: Time) -> Time:
    return left + right


# Sums of larger floats could overflow to infinity.
_MOST = 10**100


def check_costs(costs: object) -> Costs:
    """Returns costs that were given to a call; None stands for the defaults.

    Raises:
        InvalidArgument: it is something else.
    """
    if costs is None:
        return Costs()
    if not isinstance(costs, Costs):
        raise InvalidArgument(f"costs is {named(costs)}: give Costs(...), such as Costs(forward=1.0, transfer=0.1)")
    return costs


def _validate(name: str, value: object) -> None:
    if not is_number(value):
        raise ScheduleError(f"{name}={value!r} is not a number: give an int, a float, a Fraction, or one per stage")
    # Also refuses nan. As Python's own float: NumPy warns of a limit that its floats do not hold.
    if value < 0 or not (value if isinstance(value, Rational) else float(value)) < _MOST:
        shown = f"{value}" if len(f"{value}") < 40 else f"{value}"[:36] + "..."
        raise ScheduleError(f"{name}={shown} cannot be a cost: give a number from 0 to 1e100")


def _spread(name: str, amount: Amount, count: int, of: str = "stages") -> tuple[Time, ...]:
    if not isinstance(amount, tuple):
        return (amount,) * count  # type: ignore[return-value]  # not a Sequence any more: __post_init__ made tuples
    if len(amount) != count:
        raise ScheduleError(f"{name} has {len(amount)} values for {count} {of}: give one number, or {count} of them")
    return amount
