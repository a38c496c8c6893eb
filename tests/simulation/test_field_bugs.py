"""Bugs that people met end at once on simulated ranks, with who waits where and which calls differ."""

import inspect
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import echelon
from tests.helpers import field_bugs
from tests.helpers.field_bugs import BUGS

DEADLOCKS = {
    "skipped_barrier",
    "gathered_on_rank_0",
    "skipped_batch_statistics",
    "early_stopping",
    "monitored_barrier",
    "seed_never_set",
    "destroyed_early",
    "groups_in_other_order",
    "groups_counted_apart",
    "gathered_in_the_wrong_group",
    "batch_without_its_send",
    "receive_before_send",
    "send_without_receive",
    "uneven_batches",
}


def places_in(program):
    """Returns the marked lines of a program, each with the ranks that are there."""
    lines, first = inspect.getsourcelines(program)
    found = {number: re.search("# at: ([0-9 ]+)", line) for number, line in enumerate(lines, first)}
    return {number: list(map(int, match[1].split())) for number, match in found.items() if match}


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a name that torch replaced in 2.13
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a __del__ that fails
@pytest.mark.usefixtures("collected")
def test_a_bug_is_explained_with_the_lines_of_the_program(name):
    bug = BUGS[name]
    began = time.monotonic()
    with pytest.raises(echelon.EchelonError) as caught:
        echelon.simulate(bug.program, bug.ranks)
    assert time.monotonic() - began < 20
    error, places = caught.value, places_in(bug.program)
    assert places
    assert isinstance(error, echelon.DeadlockError) == (name in DEADLOCKS)
    said = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert "site-packages" not in said
    for number, ranks in places.items():
        place = re.escape(f"{field_bugs.__file__}:{number}")
        if name in DEADLOCKS:
            assert all(re.search(rf"rank {rank}\b.* at {place}\b", said) for rank in ranks), said
        else:
            assert re.search(rf"{place}\b", said), said
            assert any(f"rank {rank}" in said for rank in ranks), said


def skips_a_dim_of_the_mesh():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(2), group=mesh.get_group("dp"))


def test_a_group_of_a_mesh_is_named_by_its_dim_and_its_ranks():
    with pytest.raises(echelon.DeadlockError, match=re.escape("of group 'dp: ranks [0, 2]'")):
        echelon.simulate(skips_a_dim_of_the_mesh, 4)


def differs_under_nccl():
    dist.init_process_group("nccl")
    if dist.get_rank():
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(2))


def test_an_error_under_nccl_is_not_hidden_by_torchs_log_of_it():
    with pytest.raises(echelon.CollectiveMismatch, match=r"barrier, .*but all_reduce"):
        echelon.simulate(differs_under_nccl, 2)


def uses_equal_groups_in_turn():
    dist.init_process_group("gloo")
    groups = [dist.new_group(group_desc=each) for each in (None, None, "metrics")]
    for group in groups if dist.get_rank() else groups[::-1]:
        dist.all_reduce(torch.ones(2), group=group)


def test_groups_of_the_same_ranks_have_names_of_their_own():
    with pytest.raises(echelon.DeadlockError) as raised:
        echelon.simulate(uses_equal_groups_in_turn, 2)
    assert "in collectives of different groups: use the groups in the same order on every rank" in str(raised.value)
    assert "of group 'metrics: ranks [0, 1], number 3'" in str(raised.value)
    assert "of group 'ranks [0, 1]'" in str(raised.value)


def gathers_into_too_little():
    dist.init_process_group("gloo")
    dist.all_gather(list(torch.empty(2, 3)), torch.ones(3))
    torch.ops._c10d_functional.all_gather_into_tensor_out(
        torch.ones(3), 2, group_name=dist.group.WORLD.group_name, out=torch.empty(5)
    )


def test_an_output_that_is_too_small_is_refused_before_anything_is_sent():
    with pytest.raises(echelon.SizeMismatch, match="expected 2 times the 3 elements of the input, got 5"):
        echelon.simulate(gathers_into_too_little, 2)


def test_each_bug_names_a_thread_and_says_what_is_wrong():
    threads = [bug.thread for bug in BUGS.values()]
    assert len(threads) == len(set(threads)) >= 22
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in threads)
    assert all(bug.what.endswith(".") for bug in BUGS.values())
