"""File of a calibrated device. Read without torch, which takes seconds to import."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echelon.arguments import is_amount, is_count
from echelon.errors import LaunchError
from echelon.foresight.play.device import Curve, Device

_FORMAT = 2
_ABOVE_ZERO = (
    "memory_bytes",
    "memory_bandwidth",
    "local_bandwidth",
    "matmul_share",
    "attention_share",
    "memory_share",
)


def save(device: Device, path: str | os.PathLike[str]) -> None:
    """Writes a device to a file."""
    values = {each.name: _plain(getattr(device, each.name)) for each in fields(device)}
    Path(path).write_text(json.dumps({"format": _FORMAT, **values}, indent=1) + "\n")


def _plain(value: Any) -> Any:
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def load(path: str | os.PathLike[str]) -> Device:
    """Reads a device that `save` has written.

    Raises:
        LaunchError: the file cannot be read, or holds no such device.
    """
    try:
        values = json.loads(Path(path).read_text())
        if values.pop("format") != _FORMAT:
            raise ValueError("it is of another format")
        values["curves"] = _curves_of(values["curves"])
        if values["is_synchronous"]:
            # The time of a kernel is looked up in these without a default.
            for name in ("add", "attention", "attention_backward", "matmul_m", "matmul_n", "matmul_k"):
                _check_curve(name, values["curves"][name])
        for name in ("num_sms", "per_host", *["cores"] * values["is_synchronous"]):
            if not is_count(values[name], 1):
                raise ValueError(f"{name} is {values[name]!r}")
        for name in _ABOVE_ZERO:
            if not (is_amount(values[name]) and values[name] > 0):
                raise ValueError(f"{name} is {values[name]!r}")
        for name in ("name", "machine", "generation"):
            if not isinstance(values[name], str):
                raise ValueError(f"{name} is {values[name]!r}")
        # `Device.peak_of` falls back on float32, so a file without it is refused.
        values["peak"] = MappingProxyType({"float32": values["peak"]["float32"], **values["peak"]})
        if not all(is_amount(rate) and rate > 0 for rate in values["peak"].values()):
            raise ValueError(f"peak is {dict(values['peak'])!r}")
        networks = {name: (float(latency), float(rate)) for name, (latency, rate) in values["networks"].items()}
        if not all(0 <= latency < math.inf and 0 < rate < math.inf for latency, rate in networks.values()):
            raise ValueError(f"networks is {networks!r}")
        values["networks"] = MappingProxyType(networks)
        values["links"] = MappingProxyType({name: _links_of(curves) for name, curves in values["links"].items()})
        values["sources"] = tuple(values["sources"])
        return Device(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, KeyError):
            reason = f"{error.args[0]} is missing"
        raise LaunchError(f"gpu={os.fspath(path)!r}: {reason}: make the file by echelon foresee --calibrate") from None


def _curves_of(values: Mapping[str, Any]) -> Mapping[str, Curve]:
    curves = {name: tuple((float(size), float(seconds)) for size, seconds in points) for name, points in values.items()}
    for name, curve in curves.items():
        _check_curve(name, curve)
    return MappingProxyType(curves)


def _links_of(values: Mapping[str, Any]) -> Mapping[str, Curve]:
    for name in values:
        kind, _, num_ranks = name.partition(" ")
        if not kind or not num_ranks.isdecimal() or int(num_ranks) < 1:
            raise ValueError(f"the link {name!r} is no kind and number of ranks, as 'all_reduce 2'")
    return _curves_of(values)


def _check_curve(name: str, curve: Curve) -> None:
    rises = all(before[0] < after[0] for before, after in pairwise(curve))
    # Between two points a curve is a power law, which takes the logarithms of all values.
    if len(curve) < 2 or not rises or not all(0 < value < math.inf for point in curve for value in point):
        raise ValueError(f"the curve {name!r} needs two points or more, rising and above 0")
