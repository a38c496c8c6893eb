"""The times of steps that run on a device are those at which the device comes to them, not the CPU."""

import pytest
import torch

from echelon.pipeline.run.interpreter import EventClock, HostClock, clock_for


class Device:
    """A device that takes 5 ms for everything that is queued, and a CPU that is at 100 s all the time."""

    def __init__(self):
        self.milliseconds = 0.0
        self.synchronized = 0

    def compute(self):
        self.milliseconds += 5.0

    def event(self):
        device = self

        class Event:
            def record(self):
                self.at = device.milliseconds

            def synchronize(self):
                device.synchronized += 1

            def elapsed_time(self, other):
                return other.at - self.at

        return Event()


def test_steps_on_a_device_last_as_long_as_they_take_there():
    device = Device()
    device.compute()  # what was queued before does not count
    clock = EventClock(lambda: 100.0, device.event)
    spans = []
    for _ in range(2):
        begun = clock.mark()
        device.compute()
        spans.append((begun, clock.mark()))
    assert device.synchronized == 1  # when both clocks were read: not while steps are queued
    assert clock.seconds(spans) == [pytest.approx((100.0, 100.005)), pytest.approx((100.005, 100.010))]
    assert device.synchronized == 2
    assert clock.seconds([]) == []


def test_on_the_cpu_it_is_the_backends_clock():
    times = iter([1.0, 2.0])
    clock = clock_for([torch.ones(1), torch.ones(1, device="meta")], lambda: next(times))
    assert isinstance(clock, HostClock)
    assert clock.seconds([(clock.mark(), clock.mark())]) == [(1.0, 2.0)]
