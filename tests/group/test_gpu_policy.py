"""What a group does with tensors of a GPU that its backend has no path for. No GPU is needed: a stand-in plays one."""

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import echelon
from echelon.backends.host_copies import HostCopies, HostCopy
from echelon.group.group import ProcessGroup
from echelon.group.staging import OFF, ON, VARIABLE, fallback_is_on
from echelon.launch.environment import REQUIRED
from tests.helpers.stream_log import StreamLog
from tests.helpers.worlds import gloo_world


class StandIn(HostCopies):
    """A device whose tensors are torch's meta tensors, with the values kept beside them.

    What is copied to the host is garbage until it was waited for.
    """

    def __init__(self):
        self.memory = {}

    def put(self, values):
        return self.write(values.to("meta"), values)

    def write(self, tensor, values):
        self.memory[id(tensor)] = tensor, values.clone().reshape(tensor.shape)
        return tensor

    def read(self, tensor):
        assert tensor.device.type == "meta"
        return self.memory[id(tensor)][1]

    def handles(self, tensor):
        return tensor.device.type == "meta"

    def to_host(self, tensor):
        host = torch.full(tensor.shape, 77, dtype=tensor.dtype)

        def copy_back(result, place):
            return self.put(result) if place is None else self.write(place, result)

        return HostCopy(host, lambda: host.copy_(self.read(tensor)), copy_back)


def values(group, rows=4, dtype=torch.float32):
    return (torch.arange(rows * 3).view(rows, 3) + 10 * group.rank).to(dtype)


def in_place(call):
    """The tensor that was given is returned, and holds the result."""

    def run(group, put):
        given = put(values(group))
        assert call(group, given) is given
        return [given]

    return run


def coalesced_in_place(call):
    def run(group, put):
        given = [put(values(group)), put(values(group, 2, torch.int64))]
        found = call(group, given)
        assert all(one is other for one, other in zip(found, given, strict=True))
        return found

    return run


def lists(call):
    return lambda group, put: call(group, [put(values(group)), put(values(group, 2, torch.int64))])


def into_out(call):
    """Something of the right shape is given for the result, and returned."""

    def run(group, put):
        out = put(torch.zeros_like(call(group, values(group, 4), None)))
        assert call(group, put(values(group, 4)), out) is out
        return [out]

    return run


def scatter(group, put):
    """Who gives nothing has no device for its part."""
    part = group.scatter(put(values(group)) if group.rank == 1 else None, 1)
    return [part] if group.rank == 1 else []


CALLS = {
    "all_reduce(sum)": in_place(lambda group, given: group.all_reduce(given)),
    "all_reduce(mean)": in_place(lambda group, given: group.all_reduce(given, "mean")),
    "async all_reduce": in_place(lambda group, given: group.all_reduce(given, async_op=True).wait()),
    "reduce": in_place(lambda group, given: group.reduce(given, 1)),
    "broadcast": in_place(lambda group, given: group.broadcast(given, 1)),
    "all_gather": lambda group, put: [group.all_gather(put(values(group, 1 + group.rank)))],
    "async all_gather": lambda group, put: [group.all_gather(put(values(group)), async_op=True).wait()],
    "gather": lambda group, put: [found for found in [group.gather(put(values(group)), 1)] if found is not None],
    "scatter": scatter,
    "reduce_scatter": lambda group, put: [group.reduce_scatter(put(values(group, 5)), "max")],
    "all_to_all": lambda group, put: [group.all_to_all(put(values(group)))],
    "all_gather(out)": into_out(lambda group, given, out: group.all_gather(given, out)),
    "reduce_scatter(out)": into_out(lambda group, given, out: group.reduce_scatter(given, out=out)),
    "all_to_all(out)": into_out(lambda group, given, out: group.all_to_all(given, out)),
    "all_reduce_coalesced": coalesced_in_place(lambda group, given: group.all_reduce_coalesced(given)),
    "reduce_coalesced": coalesced_in_place(lambda group, given: group.reduce_coalesced(given, 1)),
    "reduce_scatter_coalesced": lists(lambda group, given: group.reduce_scatter_coalesced(given)),
    "all_gather_coalesced": lists(lambda group, given: group.all_gather_coalesced(given)),
    "gather_coalesced": lists(lambda group, given: group.gather_coalesced(given, 1) or []),
}


def on_the_device(group, name):
    device = group.backend.host_copies = StandIn()
    return [device.read(tensor) for tensor in CALLS[name](group, device.put)]


def on_the_host(group, name):
    return CALLS[name](group, torch.clone)


@pytest.mark.parametrize("name", CALLS)
def test_a_round_trip_gives_what_the_host_gives(name, monkeypatch, caplog):
    """Values, shape and dtype, on the device of the caller; and it is said at every call."""
    monkeypatch.setenv(VARIABLE, "1")
    wanted = echelon.simulate(on_the_host, 3, (name,)).results
    assert not caplog.records
    found = echelon.simulate(on_the_device, 3, (name,)).results
    for got, expected in zip(found, wanted, strict=True):
        assert [(each.dtype, each.shape) for each in got] == [(each.dtype, each.shape) for each in expected]
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == (1 if name == "scatter" else 3)
    collective = name.removeprefix("async ").partition("(")[0]
    for text in texts:
        assert text.startswith(f"{collective}: a tensor on meta goes through the host's memory")
        assert "set ECHELON_ENABLE_GPU_FALLBACK=0" in text


@pytest.mark.parametrize("name", CALLS)
def test_without_the_switch_it_is_an_error_that_names_both_ways_out(name, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(
        echelon.UnsupportedOp, match=r"a tensor on meta, for which backend='simulated' has no path: "
    ) as told:
        echelon.simulate(on_the_device, 2, (name,))
    assert 'use backend="nccl", or set ECHELON_ENABLE_GPU_FALLBACK=1' in str(told.value)


def fail_and_go_on(group):
    device = group.backend.host_copies = StandIn()
    with pytest.raises(echelon.UnsupportedOp):
        group.all_reduce(device.put(torch.ones(2)))
    return group.all_reduce(torch.ones(2)).tolist()


def into_the_host(group):
    device = group.backend.host_copies = StandIn()
    out = torch.zeros(4)
    assert group.all_gather(device.put(torch.ones(2)), out) is out
    with pytest.raises(echelon.SizeMismatch):
        group.all_gather(device.put(torch.ones(2)), device.put(torch.zeros(5)))
    return out.tolist()


def test_a_result_can_stay_on_the_host_and_one_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert echelon.simulate(into_the_host, 2).results == [[1.0] * 4] * 2


def test_the_group_is_usable_after_the_error(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert echelon.simulate(fail_and_go_on, 2).results == [[2.0, 2.0]] * 2


def mixed(group):
    device = group.backend.host_copies = StandIn()
    given = torch.ones(2) if group.rank else device.put(torch.ones(2))
    found = group.all_reduce(given)
    return (found if group.rank else device.read(found)).tolist()


def test_ranks_with_and_without_a_gpu_meet(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert echelon.simulate(mixed, 2).results == [[2.0, 2.0]] * 2


def say_it_twice(group):
    device = group.backend.host_copies = StandIn()
    for _ in range(2):
        group.all_reduce(device.put(torch.ones(2)))


def test_it_is_said_at_every_call(monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "on")
    echelon.simulate(say_it_twice, 1)
    assert len(caplog.records) == 2


def test_messages_have_no_round_trip(monkeypatch):
    """Whoever receives would not know that there was one."""
    monkeypatch.setenv(VARIABLE, "1")

    def act(group):
        group.backend.host_copies = StandIn()
        group.send(torch.ones(2, device="meta"), 1)

    with pytest.raises(echelon.UnsupportedOp, match=r"send: a tensor on meta, .* give it memory there first"):
        echelon.simulate(act, 2)


def test_a_device_that_cannot_be_copied_from_is_refused_whatever_the_switch(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(echelon.UnsupportedOp, match="this backend can only move tensors on cpu"):
        echelon.simulate(lambda group: group.all_reduce(torch.ones(2, device="meta")), 1)


@pytest.mark.parametrize("text", [*ON, "True", " YES "])
def test_what_turns_it_on(text):
    assert fallback_is_on({VARIABLE: text})


@pytest.mark.parametrize("text", [*OFF, "False", "OFF"])
def test_what_turns_it_off(text):
    assert not fallback_is_on({VARIABLE: text})
    assert not fallback_is_on({})


@pytest.mark.parametrize("text", ["2", "no", "enable", "on please"])
def test_anything_else_is_an_error_that_lists_what_is_not(text):
    with pytest.raises(echelon.LaunchError) as told:
        fallback_is_on({VARIABLE: text})
    assert str(told.value) == (
        f"ECHELON_ENABLE_GPU_FALLBACK={text!r}: use one of 1, true, yes, on to turn it on, or one of 0, false, off or "
        "nothing to turn it off"
    )


def test_an_asynchronous_operation_is_queued_beside_and_joined_by_who_takes_its_result():
    with gloo_world(2) as world:

        def act(backend):
            log = []
            backend.aside = lambda _: StreamLog(log)
            group = ProcessGroup(backend)
            work = group.all_reduce(torch.ones(2), async_op=True)
            group.all_reduce(torch.ones(2))  # a blocking one stays in the caller's stream
            before = list(log)
            work.wait()
            return before, log

        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(act, world))
    assert results == [([("queued", False)], [("queued", False), ("joined", True)])] * 2


def test_a_barrier_waits_for_what_the_gpu_of_each_rank_has_queued():
    """One that only the CPUs had come to was passed while GPUs were still at work."""
    with gloo_world(2) as world, ThreadPoolExecutor(2) as threads:
        finished, is_late = threading.Event(), threading.Event()

        def finish_late():
            assert is_late.wait(20.0)
            finished.set()

        world[1]._engines.finish_queued = finish_late
        waiting = threads.submit(ProcessGroup(world[0]).barrier)
        late = threads.submit(ProcessGroup(world[1]).barrier)
        assert not finished.is_set()
        is_late.set()
        waiting.result(20.0)
        assert finished.is_set()
        late.result(20.0)


PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_the_code_of_the_page_runs(monkeypatch):
    for name in REQUIRED:
        monkeypatch.delenv(name, raising=False)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    variables = {}
    exec(compile(code, PAGE.name, "exec"), variables)
    assert variables["gradient"].tolist() == [1.0] * 4
