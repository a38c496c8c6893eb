"""Copies between the host and its GPU, and operators of the host, played on round numbers."""

from dataclasses import replace

import pytest

from echelon.foresight.play.allocator import memory_of
from echelon.foresight.play.devices import DEVICES
from echelon.foresight.play.player import play
from echelon.foresight.roles import digest
from echelon.foresight.trace import Allocate, Copy, HostKernel
from tests.helpers.traces import LINKS, PLAIN, Step

SECOND = 10
"""Bytes of a copy that takes a second."""


def role_of(step, device=PLAIN):
    return play({0: step.trace()}, [0] * LINKS.world_size, device, LINKS).roles[0]


def spans(step):
    return [(copy.start, copy.end) for copy in role_of(step).copies]


def test_a_copy_runs_beside_kernels_of_another_stream_and_takes_nothing_from_them():
    role = role_of(Step().copy(2 * SECOND, stream=1).kernel(3))
    assert role.seconds == 3
    assert role.shares.copies == 0
    assert role_of(Step().copy(2 * SECOND).kernel(3)).seconds == 5, "in order on one stream"


def test_each_direction_has_an_engine_that_does_one_copy_after_another():
    both = Step().copy(SECOND, stream=1).copy(SECOND, to_gpu=False, stream=2).copy(SECOND, stream=3)
    assert sorted(spans(both)) == [(0, 1), (0, 1), (1, 2)]
    # The engine takes them in the order in which streams get to them, not in that of the calls.
    late = Step().kernel(3).copy(SECOND).copy(2 * SECOND, stream=1)
    assert spans(late) == [(0, 2), (3, 4)]


def test_a_stream_waits_for_the_event_after_a_copy():
    step = Step().copy(2 * SECOND, stream=1).record(7, stream=1).wait_event(7).kernel(1)
    role = role_of(step)
    assert role.seconds == 3
    assert role.shares.copies == pytest.approx(2 / 3)


def test_the_host_goes_on_unless_it_waits_for_a_copy():
    launches = replace(PLAIN, launch_seconds=0.5)
    ahead = Step().copy(2 * SECOND, stream=1).kernel(1)
    assert role_of(ahead, launches).runs[0].start == 0.5
    behind = Step().copy(2 * SECOND, stream=1).host_wait(stream=1).kernel(1)
    assert role_of(behind, launches).runs[0].start == 2.5


def test_operators_of_the_host_take_its_time_and_none_of_the_gpu():
    role = role_of(Step().kernel(3).on_host(10).kernel(1))
    assert (role.seconds, role.shares.host) == (4, 0), "the host computes beside the first kernel"
    waits = role_of(Step().kernel(1).host_wait().on_host(10).kernel(1))
    assert (waits.seconds, waits.shares.host) == (4, 0.5)
    assert sum(waits.shares.kernels.values()) + sum(waits.shares[1:]) == pytest.approx(1)
    assert role_of(Step().on_host(10, launches=3), replace(PLAIN, launch_seconds=1.0)).seconds == 5


def test_copies_are_rows_beside_a_timeline():
    step = Step().copy(SECOND).kernel(1).copy(SECOND, to_gpu=False)
    played = play({0: step.trace()}, [0] * LINKS.world_size, PLAIN, LINKS)
    assert [[span.step for span in row] for row in played.timeline().beside[0]] == [["copy to GPU"], ["copy to host"]]


def test_memory_of_the_host_is_counted_for_itself():
    step = Step().allocate(1, 2048).allocate(2, 4096, on_host=True).free(1).allocate(3, 512, on_host=True).free(2)
    step.allocate(4, 1024, on_host=True)
    step.live = (Allocate(9, 1024, "optimizer", -1, -1, 0, True),)
    memory = memory_of(step.trace(), 2 << 20)
    assert (memory.live_peak, memory.host_peak, memory.kinds_at_peak) == (
        2048,
        1024 + 4096 + 512,
        {"activations": 2048},
    )
    assert memory.reserved == ((-1, 2 << 20),), "reserved by the first step"


def test_ranks_may_differ_in_memory_of_the_host_but_not_in_copies():
    plain = digest(Step().kernel(1).trace())
    assert digest(Step().kernel(1).allocate(1, 512, on_host=True).free(1).trace()) == plain
    assert digest(Step().kernel(1).copy(10).trace()) != plain


@pytest.mark.parametrize(
    ("name", "link", "host"),
    # As measured by nvbandwidth, and an eighth of the memory of two sockets, of which 80 % are reached.
    [("a100", 24.8e9, 409.6e9 * 0.8 / 8), ("h100", 55.4e9, 614.4e9 * 0.8 / 8), ("h200", 55.4e9, 614.4e9 * 0.8 / 8)],
)
def test_times_of_the_table_of_devices(name, link, host):
    device = DEVICES[name]
    copy = Copy(0, True, 1 << 30, "forward", -1, -1)
    assert device.copy_seconds(copy) == pytest.approx((1 << 30) / link + device.kernel_seconds, rel=2e-3)
    computed = HostKernel("add", 1 << 30, 1, "optimizer", -1, -1)
    assert device.host_seconds(computed) == pytest.approx((1 << 30) / host + device.launch_seconds)
