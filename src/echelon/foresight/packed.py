"""Traces as bytes, which a child process hands to its parent. Pure."""

from __future__ import annotations

import marshal
from dataclasses import fields

from echelon.foresight.trace import (
    Allocate,
    Collective,
    Entry,
    Free,
    Group,
    HostWait,
    Kernel,
    Message,
    RecordEvent,
    Trace,
    Wait,
    WaitEvent,
)

_KINDS: tuple[type[Entry], ...] = (
    Kernel,
    Collective,
    Message,
    Wait,
    RecordEvent,
    WaitEvent,
    HostWait,
    Allocate,
    Free,
)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def packed(trace: Trace) -> bytes:
    """Returns a trace as bytes.

    Raises:
        ValueError: steps of its schedule are not plain values.
    """
    values = {field.name: getattr(trace, field.name) for field in fields(trace)}
    for name in ("entries", "earlier"):
        values[name] = [(_NUMBERS[type(entry)], *entry) for entry in values[name]]
    values["live"] = [tuple(entry) for entry in trace.live]
    values["groups"] = [tuple(group) for group in trace.groups]
    return marshal.dumps(values)


def unpacked(data: bytes) -> Trace:
    """Returns the trace of bytes that `packed` has made. Only for bytes of our own processes."""
    values = marshal.loads(data)
    for name in ("entries", "earlier"):
        values[name] = tuple(_KINDS[number]._make(rest) for number, *rest in values[name])
    values["live"] = tuple(map(Allocate._make, values["live"]))
    values["groups"] = tuple(map(Group._make, values["groups"]))
    return Trace(**values)
