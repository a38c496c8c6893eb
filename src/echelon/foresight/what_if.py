"""Forecasts of a step with one change: communication, kernels, their precision or layout, or torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from echelon.foresight.play.fusion import fuse
from echelon.foresight.play.played import Played
from echelon.foresight.play.player import play
from echelon.foresight.report import seconds_text
from echelon.foresight.trace import CHANNELS_LAST, CONVOLUTIONS, TF32, Entry, Kernel, Trace

_LEAST_EXPOSED = 0.02
"""Least exposed share of a step whose communication is worth hiding. Below it the kernels are tried instead."""
_LEAST_KERNELS = 0.1
"""Least share of a step that kernels have whose change is tried."""
_IDEALS = {
    "matmul": "matrix products ran at the peak of the GPU: ",
    "attention": "attention ran at the peak of the GPU: ",
    "other": "kernels but matmul and attention took no time: at best ",
}
"""Forecasts for the longest kind of kernels."""
_CHANNELS_FIRST = "native_group_norm"
"""Operator whose results have channels first, so that its neighbours convert images in any layout."""
_NO_CHANGE = 5e-4
"""Share of the step below which a change does not count."""


def what_ifs(played: Played, traces: Mapping[int, Trace]) -> list[str]:
    """Returns forecasts of a step, each with one change, as sentences.

    Args:
        played: the step as it is.
        traces: recorded step of each role.
    """
    step = played.seconds
    if not step:
        return []
    found = []
    # The order is that of the trouble: a script changes its communication, then options, then its hardware.
    if sum(played.exposed.values()) > _LEAST_EXPOSED * step:
        name, seconds = next(iter(played.exposed.items()))
        found.append(
            f"communication of {name.group} at {name.place or 'an unknown line'} were hidden by kernels: at best "
            f"{_compared(step - seconds, step)}"
        )
    # Neither TF32 nor layouts matter to processors, whose kernels were measured as they are.
    if not (played.device.curves or played.device.is_synchronous):
        found += _with_tf32(played, traces)
        found += _with_channels_last(played, traces)
        found += _compiled(played, traces)
    if sum(played.exposed.values()) <= _LEAST_EXPOSED * step:
        found += _with_ideal_kernels(played, traces)
    if len(played.cluster.hosts) > 1:
        faster = replace(played.cluster, bandwidth=2 * played.cluster.bandwidth)
        again = play(traces, played.classes, played.device, faster)
        found.append(f"the network between hosts were twice as fast: {_compared(again.seconds, step)}")
    return found


def _with_tf32(played: Played, traces: Mapping[int, Trace]) -> list[str]:
    """Returns the forecast with products of float32 by TF32. Empty if they are short, or the GPU has none."""
    device = played.device

    def uses_float32(kernel: Kernel) -> bool:
        # Convolutions have a setting of their own, which allows TF32 unless the program forbids it.
        return kernel.kind == "matmul" and kernel.dtype == "float32" and kernel.name not in CONVOLUTIONS

    kernels = [each for each in played.slowest.program.trace.entries if type(each) is Kernel]
    seconds = sum(device.seconds(each) for each in kernels if uses_float32(each))
    if TF32 not in device.peak or seconds < _LEAST_KERNELS * played.seconds:
        return []
    change = "products of float32 used TF32, as by torch.set_float32_matmul_precision('high')"
    return _changed(change, played, traces, lambda each: each._replace(dtype=TF32) if uses_float32(each) else each)


def _with_channels_last(played: Played, traces: Mapping[int, Trace]) -> list[str]:
    """Returns the forecast with images that need no other layout. Empty if none do, or some would need it again."""
    entries = (each for trace in traces.values() for each in trace.entries)
    if any(type(each) is Kernel and each.name == _CHANNELS_FIRST for each in entries):
        return []
    change = "images had channels last, as by .to(memory_format=torch.channels_last) of model and batch"
    return _changed(change, played, traces, lambda each: None if each.name == CHANNELS_LAST else each)


def _compiled(played: Played, traces: Mapping[int, Trace]) -> list[str]:
    """Returns the forecast with compiled modules. Empty if some are compiled, or few kernels could be joined."""
    slowest = played.slowest
    kernels = [each for each in slowest.program.trace.entries if type(each) is Kernel]
    # A program that compiles a part of its model knows why it leaves out the rest.
    if any(each.is_compiled for each in kernels) or slowest.shares.kernels.get("other", 0.0) < _LEAST_KERNELS:
        return []
    return _changed(
        "torch.compile joined the small kernels of the modules",
        played,
        traces,
        # The compiler chooses channels last by itself.
        lambda each: None if each.name == CHANNELS_LAST else each._replace(is_compiled=each.module >= 0),
    )


def _changed(
    what: str, played: Played, traces: Mapping[int, Trace], change: Callable[[Kernel], Kernel | None]
) -> list[str]:
    """Returns the forecast with changed kernels, None for none. Empty if no kernel changes, or the step is as long."""
    if not any(type(each) is Kernel and change(each) != each for trace in traces.values() for each in trace.entries):
        return []

    def entries(trace: Trace) -> Iterator[Entry]:
        for each in trace.entries:
            entry = change(each) if type(each) is Kernel else each
            if entry is not None:
                yield entry

    changed = {rank: fuse(replace(trace, entries=tuple(entries(trace)))) for rank, trace in traces.items()}
    # Memory is as before: a sentence is about time.
    seconds = play(changed, played.classes, played.device, played.cluster).seconds
    if abs(seconds / played.seconds - 1) < _NO_CHANGE:
        return []
    return [f"{what}: {_compared(seconds, played.seconds)}"]


def _with_ideal_kernels(played: Played, traces: Mapping[int, Trace]) -> list[str]:
    """Returns the forecast with the longest kind of kernels at its limit. Empty if another part is longer."""
    shares = played.slowest.shares
    kind = max(shares.kernels, key=shares.kernels.__getitem__)
    others = shares.contention, shares.exposed, shares.waiting, shares.idle, shares.copies, shares.host
    # Measured times hold launches as well, which have no peak.
    if shares.kernels[kind] <= max(others) or played.device.curves:
        return []
    ideal = play(traces, played.classes, replace(played.device, ideal=kind), played.cluster)
    return [_IDEALS[kind] + _compared(ideal.seconds, played.seconds)]


def _compared(seconds: float, step: float) -> str:
    change = seconds / step - 1
    if abs(change) < _NO_CHANGE:
        return "no change"
    return f"{seconds_text(seconds)} instead of {seconds_text(step)} ({change:+.1%})"
