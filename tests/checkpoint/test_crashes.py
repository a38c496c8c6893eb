"""A crash anywhere in a save: the newest committed checkpoint loads, or the new one, and never anything else."""

import warnings

import pytest

import echelon
from echelon.checkpoint.files.claim import remove
from echelon.checkpoint.files.folder import Folder
from echelon.checkpoint.ranks.saving import Saver
from tests.helpers.checkpoints import load, same, state_of, tensors_of
from tests.helpers.crashing_disk import CrashingDisk

SAVES = ((1, 1), (2, 2), (3, 3), (3, 4), (5, 5))
"""Step and content of each save. Step 3 is saved twice."""


def recorded(num_ranks, exchanges):
    """Returns the disk of a job that keeps two checkpoints, with the calls of all its saves."""
    disk = CrashingDisk(exchanges=exchanges)
    disk.make_folder("/runs")
    disk.sync_folder("/")

    def job(group):
        saver = Saver("/runs/gpt", group, keep=2, fs=disk)
        for number, (step, content) in enumerate(SAVES):
            saver.save(step, state_of(tensors_of(content), {"content": content}))
            if group.rank == 0:
                disk.mark(number)

    echelon.simulate(job, num_ranks)
    return disk


def check_after_crash(disk, count, seed):
    """Crashes after some calls; loads and verifies, and saves once more now and then."""
    before, last = disk.replayed(count)
    after = before.crashed(seed)
    found = load("/runs/gpt", fs=after)
    allowed = [SAVES[number] for number in ([0] if last is None else [last, last + 1]) if number < len(SAVES)]
    if found is None:
        assert last is None, "a committed checkpoint is gone"
    else:
        step, tensors = found
        contents = [content for each, content in allowed if each == step]
        assert any(same(tensors, tensors_of(content)) for content in contents), f"step {step} is none of {allowed}"
    folder = Folder("/runs/gpt", after)
    assert [found.problem for found in folder.found()] == [""] * len(folder.steps())
    assert [problem for step in folder.steps() for problem in folder.verify(step)] == []
    if seed % 8 == 0:
        check_next_save(after)


def check_next_save(after):
    """Saves after a crash; nothing is left of the save before."""
    Saver("/runs/gpt", fs=after, keep=2).save(9, state_of(tensors_of(9)))
    step, tensors = load("/runs/gpt", fs=after)
    assert (step, same(tensors, tensors_of(9))) == (9, True)
    assert [name for name in after.list_folder("/runs/gpt") if not name.startswith("step-")] == []


@pytest.mark.parametrize("num_states", [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_crash_anywhere(num_states, exchanges):
    disk = recorded(2, exchanges)
    assert sum(call[0] == "swap" for call in disk.log) == exchanges
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(num_states):
            # All places first, then each again with another fate of the calls that were not synced.
            check_after_crash(disk, number % (len(disk.log) + 1), number)


def test_a_crash_while_steps_are_removed():
    """The steps that are left are whole, and the step that stays is among them."""
    disk = CrashingDisk()
    disk.make_folder("/runs")
    disk.sync_folder("/")
    saver = Saver("/runs/gpt", fs=disk)
    for step in (1, 2, 3):
        saver.save(step, state_of(tensors_of(step)))
    saved = len(disk.log)
    remove(Folder("/runs/gpt", disk), [2, 3])
    for count in range(saved, len(disk.log) + 1):
        for seed in range(8):
            after = disk.replayed(count)[0].crashed(seed)
            folder = Folder("/runs/gpt", after)
            steps = folder.steps()
            assert set(steps) in ({1, 2, 3}, {1, 3}, {1})
            assert [problem for step in steps for problem in folder.verify(step)] == []
            step, tensors = load("/runs/gpt", fs=after)
            assert (step, same(tensors, tensors_of(step))) == (steps[-1], True)
    assert steps == [1]
    check_next_save(after)
