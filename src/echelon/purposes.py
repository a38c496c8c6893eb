"""Purposes of the library's own collectives: the user's calls, and the cure if ranks differ in them. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from echelon.wording import listed

BACKWARD = "DDP's backward"
FORWARD = "DDP's forward"
JOIN = "ddp.join()"
WRAP = "DDP(model)"
SAVE = "Store.save"
LOAD = "Store.load"
PASS = "a pass of the loader"
SHARD = "ZeroOptimizer(...)"
SHARDED_STEP = "ZeroOptimizer.step"
PIPELINE = "Pipeline"
TIED = "Pipeline's tied weights"

SAME_CALLS = "every rank must call the same operations in the same order"
SAME_ARGUMENTS = f"{SAME_CALLS} with the same arguments"
"""Advice to ranks that differ in calls of their own."""

OF_MODULE = "(FSDP of "
"""Words before the module of FSDP2 whose parameters a collective gathers or reduces."""
_FSDP = "FSDP"
"""Name of such a collective."""

OF_STEPS = (BACKWARD, FORWARD)
"""Calls that each step makes."""
_STEP = " of step "
_OWN_CALL = re.compile(r"(?:in )?(?!past )(\w+)[^#]*, #\d")
"""Text of a collective that the program calls itself."""
_TRANSFER = re.compile(r"(receive from|send to) rank \d+, the \w+ of microbatch \d+ for stage \d")
"""Text of a message between two stages of a pipeline."""
_SAME_BATCHES = "give every rank the same number of batches, as by drop_last=True or a DistributedSampler"
_CURES = {
    SAVE: "call Store.save on every rank, outside of `if rank == 0`",
    LOAD: "call Store.load on every rank, outside of `if rank == 0`",
    PASS: "run each loop over the loader on every rank, to its end",
    JOIN: "if a rank waits in ddp.join(), it takes part in forwards and backwards of the others alone: save, evaluate "
    "and call collectives after the block",
    WRAP: "wrap the same models in the same order on every rank",
    SHARD: "make the same ZeroOptimizer on every rank",
    SHARDED_STEP: "call ZeroOptimizer.step on every rank",
    TIED: "make the same calls of Pipeline on every rank, as many steps",
    PIPELINE: "make the same calls of Pipeline on every rank, as many steps",
}
"""By the call."""


class Purpose(NamedTuple):
    """The user's call that a collective is a part of."""

    call: str
    """The call, as errors name it."""
    group: str = ""
    """Name of the user's group. Empty: that of the collective."""
    step: int = 0
    """Number of the reduction of gradients, from 1 on. 0: none."""

    def __str__(self) -> str:
        return f"{self.call}{_STEP}{self.step}" if self.step else self.call


def cure_of(calls: Mapping[int, str], *, have_ended: bool = False) -> str:
    """Returns the advice for ranks that wait in different calls. Empty if they are in none of the library, or in one.

    Args:
        calls: the call of each rank, as text. Empty for a rank that makes none.
        have_ended: whether the ranks without a call make no further one.
    """
    names = {rank: _name(text) for rank, text in calls.items()}
    found = set(names.values())
    if found == {_FSDP}:
        return _cure_of_sharded(calls)
    if len(found) < 2:
        return ""
    cures = list(dict.fromkeys(cure for name, cure in _CURES.items() if name in found))
    stepping = [rank for rank, name in names.items() if name in (*OF_STEPS, _FSDP)]
    others = [rank for rank in names if rank not in stepping]
    if stepping and JOIN in found:
        return "enter ddp.join() on every rank"
    if stepping and others:
        behind = f"{listed(others)} ran fewer steps (batches) than {listed(stepping)}"
        cure = f"use ddp.join(), or {_SAME_BATCHES}"
        if _FSDP in found:
            behind = f"{listed(others)} ran fewer forwards or backwards than {listed(stepping)}"
            cure = f"{_SAME_BATCHES}, and evaluate on every rank"
        if have_ended and not cures:
            return f"{behind}: {cure}"
        before, after = ([], []) if have_ended or cures else _cures_of_lone_calls(calls, found, stepping, others)
        cures += [*before, f"if {behind}, {cure}", *after]
    elif stepping:
        cures.append("run as many forwards and backwards on every rank, which takes the same number of batches")
    return "; ".join(cures)


def _cures_of_lone_calls(
    calls: Mapping[int, str], found: Collection[str], stepping: Sequence[int], others: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Returns the advice that comes before, and after, that on ranks which ran fewer steps."""
    before, after = [], []
    if FORWARD in found:
        verb = "validates" if len(stepping) == 1 else "validate"
        before.append(f"if {listed(stepping)} {verb} alone, call ddp.module there, in eval mode")
    if own := _OWN_CALL.match(calls[others[0]]):
        verb = "calls" if len(others) == 1 else "call"
        before.append(f"if {listed(others)} {verb} {own[1]} alone, call it on every rank")
        # Without a step it is of torch's DDP, which leaves out the buckets of parameters without a gradient.
        if BACKWARD in found and not any(_STEP in calls[rank] for rank in stepping):
            after.append("if some ranks leave parameters unused, give DDP find_unused_parameters=True")
    return before, after


def _cure_of_sharded(calls: Mapping[int, str]) -> str:
    """Returns the advice for ranks that all communicate for a module of FSDP2. Empty if they do so in equal calls."""
    modules = {text.partition(OF_MODULE)[2].partition(")")[0] for text in calls.values()}
    operations = {text.partition(" of ")[0] for text in calls.values()}
    if len(modules) > 1 or len(operations) > 1:
        return f"run the same layers forward and backward in the same order on every rank, and {_SAME_BATCHES}"
    return "make the module with the same shapes and dtypes on every rank" if len(set(calls.values())) > 1 else ""


def _name(text: str) -> str:
    """Returns the call of the library with which a text begins. Empty if there is none."""
    text = text.removeprefix("in ")
    if OF_MODULE in text and not text.startswith("past "):
        return _FSDP
    if _TRANSFER.match(text):
        return PIPELINE
    return next((name for name in (*OF_STEPS, *_CURES) if text.startswith(name)), "")
