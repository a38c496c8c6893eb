"""The memory of a step as a curve, and its picture."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from echelon import EchelonError, LaunchError
from echelon.foresight.memory_curves import MemoryCurves
from echelon.foresight.play.player import play
from tests.helpers.traces import LINKS, PLAIN, Step

MIB = 1 << 20


def memory_of(step, device=PLAIN):
    played = play({0: step.trace()}, [0] * 4, device, LINKS)
    return MemoryCurves(played, played.memory())


@pytest.fixture
def step():
    step = Step().allocate(1, 4 * MIB, "parameters").kernel(1).allocate(2, 8 * MIB).kernel(2)
    return step.allocate(3, 2 * MIB, "gradients").kernel(1).free(2).kernel(1)


def test_a_curve_changes_where_the_kernels_are(step):
    curve = memory_of(step).curve(3)
    assert curve.seconds == (0, 0, 1, 3, 4, 5)
    assert curve.kinds == {
        "parameters": (0, *[4 * MIB] * 5),
        "gradients": (0, 0, 0, 2 * MIB, 2 * MIB, 2 * MIB),
        "activations": (0, 0, 8 * MIB, 8 * MIB, 0, 0),
    }
    assert list(curve.reserved) == sorted(curve.reserved)


def test_a_short_curve_keeps_the_peak_and_the_end():
    step = Step()
    for index in range(300):
        step.kernel(1).allocate(index + 1, MIB * (1 + index % 7)).kernel(1).free(index + 1)
    step.allocate(999, 50 * MIB).free(999).kernel(1).allocate(1000, 3 * MIB)
    memory = memory_of(step)
    curve = memory.curve(points=10)
    assert len(curve.seconds) <= 2 * 11 + 2
    assert max(curve.kinds["activations"]) == memory[0].live_peak == 50 * MIB
    assert curve.kinds["activations"][-1] == 3 * MIB


@pytest.mark.parametrize(
    ("add", "mebibytes"),
    [
        (lambda step: step, 512),
        (lambda step: step.collective(1, 8).collective(2, 8), 512 + 688),
        (lambda step: step.collective(1, 8).collective(2, 8, group=1), 512 + 2 * 688),
        (lambda step: step.collective(1, 8, group=2), 512),  # of a single rank
        # Rank 1 is on the host of rank 0, ranks 2 and 3 are on another one.
        (lambda step: step.collective(1, 8, group=3, kind="all_to_all"), 512 + 688 + 446),
    ],
)
def test_memory_that_no_figure_counts_is_that_of_cuda_and_of_groups_that_communicate(add, mebibytes):
    step = add(Step(groups=((0, 1), (0, 2), (0,), (0, 1, 2, 3))).allocate(1, 4 * MIB).kernel(1))
    assert memory_of(step).uncounted(0) // MIB == mebibytes


def test_messages_have_buffers_of_nccl_too():
    steps = Step(0, 2).send(1, 1), Step(1, 2).receive(1, 0)
    played = play({step.rank: step.trace() for step in steps}, [0, 1], PLAIN, replace(LINKS, hosts=(2,)))
    assert MemoryCurves(played, played.memory()).uncounted(1) // MIB == 512 + 688


@pytest.mark.parametrize(("limit", "share"), [(4096, 1.0), (1200 + 300 + 1000, 0.5), (1200 + 300, 0.0), (100, 0.0)])
def test_the_part_of_the_activations_that_fits_leaves_room_for_the_rest(limit, share):
    step = Step(groups=((0, 1),)).collective(1, 8).allocate(1, 300 * MIB, "parameters")
    step.allocate(2, 1500 * MIB).allocate(3, 500 * MIB, "other").kernel(1)
    memory = memory_of(step, replace(PLAIN, memory_bytes=limit * MIB))
    assert min(1.0, memory.fitting_share) == pytest.approx(share)


def test_memory_is_a_mapping_of_roles_with_a_fullest_one(step):
    fuller = replace(Step().allocate(1, 90 * MIB).kernel(1).trace(), rank=2)
    played = play({0: step.trace(), 2: fuller}, [0, 0, 2, 2], PLAIN, LINKS)
    memory = MemoryCurves(played, played.memory())
    assert dict(memory) == played.memory()
    assert memory.fullest == 2
    others = {0: replace(memory[0], fits=False), 2: memory[2]}
    assert MemoryCurves(played, others).fullest == 0, "the figures shown are those of a rank that does not fit"
    assert max(memory.curve(3).kinds["activations"]) == 90 * MIB
    with pytest.raises(LaunchError, match="below 4"):
        memory.curve(4)


@pytest.mark.parametrize(("limit", "text"), [(20 * MIB, "limit, 0.0 GiB"), (1 << 30, "limit, 1.0 GiB (above)")])
def test_the_picture_has_kinds_and_the_limit(step, tmp_path, limit, text):
    path = tmp_path / "memory.svg"
    memory_of(step, replace(PLAIN, memory_bytes=limit)).draw(path, rank=1)
    texts = {element.text for element in ElementTree.parse(path).iter() if element.text and element.text.strip()}
    assert {"parameters", "gradients", "activations", "reserved", text, "ms", "GiB"} <= texts
    assert "memory of rank 1 on plain" in texts


def test_other_formats_are_refused(step, tmp_path):
    with pytest.raises(EchelonError, match=r"\.svg, \.png or \.pdf"):
        memory_of(step).draw(tmp_path / "memory.gif")
