"""Memory of steps: live bytes, and segments of PyTorch's caching allocator."""

import random

import pytest

from echelon.foresight.play.allocator import CachingAllocator, memory_of
from echelon.foresight.trace import Allocate
from tests.helpers.traces import Step

MIB = 1 << 20


@pytest.fixture
def allocator():
    return CachingAllocator()


@pytest.mark.parametrize(
    ("num_bytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (100 * MIB + 1, 102 * MIB),
    ],
)
def test_a_first_request_reserves_a_segment_of_its_size(allocator, num_bytes, segment):
    assert allocator.allocate(0, num_bytes)
    assert allocator.reserved == segment


def test_small_requests_share_a_segment(allocator):
    for storage in range(4):
        allocator.allocate(storage, MIB // 2)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(4, 512)
    assert allocator.reserved == 4 * MIB


def test_the_rest_of_a_large_segment_is_kept_above_a_mebibyte(allocator):
    allocator.allocate(0, 9 * MIB)
    allocator.allocate(1, 9 * MIB)
    assert allocator.reserved == 20 * MIB
    other = CachingAllocator()
    other.allocate(0, 19 * MIB)  # of 20: the rest of one MiB goes with it
    other.allocate(1, 2 * MIB)
    assert other.reserved == 40 * MIB


def test_freed_memory_is_used_again_by_the_request_that_fits_best(allocator):
    allocator.allocate(0, 64 * MIB)
    allocator.allocate(1, 32 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 30 * MIB)
    allocator.allocate(3, 64 * MIB)
    assert allocator.reserved == 96 * MIB


def test_free_neighbours_are_merged(allocator):
    allocator.allocate(0, 40 * MIB)
    allocator.free(0)
    for storage in range(4):
        allocator.allocate(storage, 10 * MIB)
    for storage in (1, 3, 2, 0):
        allocator.free(storage)
    allocator.allocate(9, 40 * MIB)
    assert allocator.reserved == 40 * MIB


def test_a_stream_does_not_get_the_blocks_of_another(allocator):
    allocator.allocate(0, 32 * MIB, stream=1)
    allocator.free(0)
    allocator.allocate(1, 32 * MIB, stream=2)
    assert allocator.reserved == 64 * MIB


def test_a_full_device_gets_back_segments_that_are_free():
    allocator = CachingAllocator(limit=64 * MIB)
    allocator.allocate(0, 40 * MIB)
    allocator.free(0)
    assert allocator.allocate(1, 60 * MIB)
    assert allocator.reserved == 60 * MIB
    assert not allocator.allocate(2, 60 * MIB)


def test_holes_between_blocks_make_a_device_full():
    allocator = CachingAllocator(limit=80 * MIB)
    allocator.allocate(0, 80 * MIB)
    allocator.free(0)
    for storage in range(4):
        allocator.allocate(storage, 20 * MIB)
    allocator.free(0)
    allocator.free(2)
    assert not allocator.allocate(9, 40 * MIB)


def test_expandable_segments_fill_holes_by_growing():
    sizes = [30 * MIB, 50 * MIB, 70 * MIB]
    plain, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for each in (plain, expandable):
        for size in sizes:
            each.allocate(0, size)
            each.free(0)
    assert plain.reserved == 150 * MIB
    assert expandable.reserved == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("limit", [None, 600 * MIB])
def test_live_bytes_fit_into_reserved_ones_under_any_order(expandable, limit):
    chance = random.Random(7)
    allocator = CachingAllocator(limit, expandable)
    live = {}
    for storage in range(3000):
        if live and chance.random() < 0.5:
            gone = chance.choice(list(live))
            allocator.free(gone)
            del live[gone]
        size = chance.choice([512, 4096, MIB, 3 * MIB, 17 * MIB, 64 * MIB]) * chance.randint(1, 3)
        if allocator.allocate(storage, size, chance.randint(0, 1)):
            live[storage] = size
        assert sum(live.values()) <= allocator.reserved <= allocator.peak
        assert limit is None or allocator.reserved <= limit
    for storage in live:
        allocator.free(storage)
    # Everything is free again: the same bytes can be given out once more.
    before = allocator.reserved
    if not expandable and limit is None:
        assert allocator.allocate(-1, 64 * MIB)
        assert allocator.reserved == before


def test_a_step_has_its_peak_with_the_kinds_that_are_alive():
    step = Step()
    step.live = (Allocate(1, 1024, "parameters", -1, -1),)
    step.allocate(2, 2048).free(2).allocate(3, 4096).allocate(4, 512, "gradients").free(3).allocate(5, 1024).free(5)
    memory = memory_of(step.trace())
    assert memory.live_peak == 1024 + 4096 + 512
    assert memory.kinds_at_peak == {"activations": 4096, "parameters": 1024, "gradients": 512}
    assert [each.storage for each in memory.alive_at_peak] == [3, 1, 4]
    assert memory.reserved_peak == 2 * MIB
    assert memory.reserved == ((-1, 2 * MIB),)


def test_a_step_that_does_not_fit_says_so():
    step = Step().allocate(1, 30 * MIB).allocate(2, 30 * MIB)
    assert memory_of(step.trace(), 60 * MIB).fits
    assert not memory_of(step.trace(), 50 * MIB).fits
    assert memory_of(step.trace(), 60 * MIB).needed_peak == 60 * MIB


def test_a_step_that_does_not_fit_needs_more_than_the_device_has():
    """The device reserves no more than it has, and the free blocks keep a request from being met."""
    step = Step().allocate(1, 30 * MIB).allocate(2, 30 * MIB)
    memory = memory_of(step.trace(), 50 * MIB)
    assert (memory.reserved_peak, memory.needed_peak) == (30 * MIB, 60 * MIB)
    # 60 MiB of tensors, and 10 MiB that are free beside a tensor of the same segment.
    step = Step().allocate(1, 20 * MIB).free(1).allocate(2, 10 * MIB).allocate(3, 50 * MIB)
    memory = memory_of(step.trace(), 65 * MIB)
    assert (memory.live_peak, memory.fits, memory.needed_peak) == (60 * MIB, False, 70 * MIB)


def test_a_step_counts_how_often_the_device_was_full():
    # Each stream's request finds the segment of the other one in its way.
    step = Step().allocate(1, 40 * MIB, stream=1).free(1).allocate(2, 40 * MIB).free(2)
    assert memory_of(step.trace(), 64 * MIB).retries == 2
    assert memory_of(step.trace()).retries == 0


def test_the_state_of_an_optimizer_divides_the_memory_of_its_first_step():
    # In the first step 100 MiB are free when the state of 10 MiB comes. In the second they have a hole less.
    step = Step().allocate(1, 100 * MIB).free(1).kernel(1, phase="optimizer")
    step.live = (Allocate(9, 10 * MIB, "optimizer", -1, -1),)
    memory = memory_of(step.trace())
    assert memory.live_peak == 110 * MIB
    assert memory.reserved_peak == 200 * MIB
