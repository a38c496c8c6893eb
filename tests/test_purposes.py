"""Cure of ranks that wait in different calls of the library, from the texts of these calls."""

import pytest

from echelon.purposes import BACKWARD, FORWARD, JOIN, LOAD, PIPELINE, SAVE, SHARD, SHARDED_STEP, TIED, WRAP, cure_of

BACK = "DDP's backward of step 5 of group 'world' at train.py:9"
SAME = "use ddp.join(), or give every rank the same number of batches, as by drop_last=True or a DistributedSampler"
IF_FEWER = f"if rank 1 ran fewer steps (batches) than rank 0, {SAME}"
ALONE = "if rank 1 calls barrier alone, call it on every rank"
SAVES = "call Store.save on every rank, outside of `if rank == 0`"


@pytest.mark.parametrize(
    ("other", "cure"),
    [
        (
            "barrier, #3 of group 'world' at train.py:20",
            f"{ALONE}; {IF_FEWER}",
        ),
        ("", IF_FEWER),
        ("past barrier, #3 of group 'world' at train.py:20", IF_FEWER),
        (BACK, ""),
        (FORWARD, "run as many forwards and backwards on every rank, which takes the same number of batches"),
        (JOIN, "enter ddp.join() on every rank"),
        (f"in {SAVE} of group 'world' at train.py:30", f"{SAVES}; {IF_FEWER}"),
    ],
)
def test_another_call_than_the_backward(other, cure):
    assert cure_of({0: BACK, 1: other}) == cure


VALIDATES = "if rank 0 validates alone, call ddp.module there, in eval mode"


@pytest.mark.parametrize(
    ("mine", "cure"),
    [
        (f"{FORWARD} of step 5", f"{VALIDATES}; {ALONE}; {IF_FEWER}"),
        (FORWARD, f"{VALIDATES}; {ALONE}; {IF_FEWER}"),
        (BACKWARD, f"{ALONE}; {IF_FEWER}; if some ranks leave parameters unused, give DDP find_unused_parameters=True"),
    ],
)
def test_other_causes_of_a_forward_and_of_torchs_backward(mine, cure):
    assert cure_of({0: f"{mine} of group 'world'", 1: "in barrier, #3 of"}) == cure


def test_a_rank_that_has_ended_ran_fewer_steps_for_sure():
    assert cure_of({0: BACK, 1: ""}, have_ended=True) == f"rank 1 ran fewer steps (batches) than rank 0: {SAME}"


@pytest.mark.parametrize("call", [BACKWARD, FORWARD, JOIN, LOAD, PIPELINE, SAVE, SHARD, SHARDED_STEP, TIED, WRAP])
def test_every_call_of_the_library_has_a_cure(call):
    assert cure_of({0: f"{call} of group 'world'", 1: "barrier"})
    assert cure_of({0: "barrier", 1: "all_reduce(sum) of float32[3]"}) == ""
