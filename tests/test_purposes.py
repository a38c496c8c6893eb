"""Cure of ranks that wait in different calls of the library, from the texts of these calls."""

import pytest

from echelon.purposes import BACKWARD, FORWARD, JOIN, LOAD, PIPELINE, SAVE, SHARD, SHARDED_STEP, TIED, WRAP, cure_of

BACK = "DDP's backward of step 5 of group 'world' at train.py:9"
RUN_FEWER = (
    "run fewer steps (batches) than rank 0: use ddp.join(), or give every rank the same number of batches, as by "
)
RUN_FEWER += "drop_last=True or a DistributedSampler"
SAVES = "call Store.save on every rank, outside of `if rank == 0`"


@pytest.mark.parametrize(
    ("other", "cure"),
    [
        (
            "barrier, #3 of group 'world' at train.py:20",
            f"rank 1 may have {RUN_FEWER}; else, call barrier on every rank",
        ),
        ("", f"rank 1 may have {RUN_FEWER}"),
        ("past barrier, #3 of group 'world' at train.py:20", f"rank 1 may have {RUN_FEWER}"),
        (BACK, ""),
        (FORWARD, "run as many forwards and backwards on every rank, which takes the same number of batches"),
        (JOIN, "enter ddp.join() on every rank"),
        (f"in {SAVE} of group 'world' at train.py:30", f"{SAVES}; else, rank 1 may have {RUN_FEWER}"),
    ],
)
def test_another_call_than_the_backward(other, cure):
    assert cure_of({0: BACK, 1: other}) == cure


@pytest.mark.parametrize(
    ("mine", "other_cause"),
    [
        (f"{FORWARD} of step 5", "if rank 0 validates alone, call ddp.module there, in eval mode"),
        (FORWARD, "if rank 0 validates alone, call ddp.module there, in eval mode"),
        (BACKWARD, "call barrier on every rank, or give DDP find_unused_parameters=True"),
    ],
)
def test_another_cause_of_a_forward_and_of_torchs_backward(mine, other_cause):
    assert (
        cure_of({0: f"{mine} of group 'world'", 1: "in barrier, #3 of"})
        == f"rank 1 may have {RUN_FEWER}; else, {other_cause}"
    )


def test_a_rank_that_has_ended_ran_fewer_steps_for_sure():
    assert cure_of({0: BACK, 1: ""}, have_ended=True) == f"rank 1 {RUN_FEWER.replace('run', 'ran', 1)}"


@pytest.mark.parametrize("call", [BACKWARD, FORWARD, JOIN, LOAD, PIPELINE, SAVE, SHARD, SHARDED_STEP, TIED, WRAP])
def test_every_call_of_the_library_has_a_cure(call):
    assert cure_of({0: f"{call} of group 'world'", 1: "barrier"})
    assert cure_of({0: "barrier", 1: "all_reduce(sum) of float32[3]"}) == ""
