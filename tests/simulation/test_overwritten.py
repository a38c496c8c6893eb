"""A simulation tells of a tensor that is changed while it is sent, which a real network would send changed."""

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.collectives.calls import run as interpreter
from echelon.simulation import Network
from echelon.testing import check_same_results

SLOW = Network(latency=1.0, bandwidth=1e6)


def change_too_early(group):
    if group.rank == 0:
        values = torch.ones(4)
        work = group.isend(values, 1)
        values[3] = 7
        work.wait()
    elif group.rank == 1:
        group.recv(0)
    else:  # until it is killed
        group.recv(1)


def test_a_tensor_that_is_changed_before_its_send_is_done_is_told_of():
    expected = (
        r"rank 0 changed a tensor before its send to rank 1 was done, at 1\.\d+ s in float32\[4\], "
        r"sent at .*test_overwritten.py:\d+: work = group.isend\(values, 1\): wait for the Work of the send first"
    )
    with pytest.raises(echelon.UnsupportedOp, match=expected):
        echelon.simulate(change_too_early, 2, network=SLOW)


def test_without_a_network_late_sends_find_it():
    assert echelon.simulate(change_too_early, 2).results == [None, None]
    with pytest.raises(echelon.UnsupportedOp, match=r"at 0 s in float32\[4\], sent at .*test_overwritten.py"):
        echelon.simulate(change_too_early, 2, late_sends=True)
    with pytest.raises(echelon.UnsupportedOp) as caught:
        echelon.explore(change_too_early, 2, late_sends=True)
    assert caught.value.__notes__[-1].endswith("echelon.simulate(change_too_early, 2, late_sends=True, seed=0)")
    with pytest.raises(echelon.UnsupportedOp):
        check_same_results(change_too_early, 2, late_sends=True)


def change_after_an_answer(group):
    """The peer's answer shows that the message has arrived, not that the send is done."""
    values = torch.ones(4)
    if group.rank == 0:
        work = group.isend(values, 1)
        group.recv(1)
        values.zero_()
        work.wait()
    else:
        group.recv(0)
        group.send(values, 0)


def test_an_answer_is_no_end_of_a_send():
    for seed in range(8):
        with pytest.raises(echelon.UnsupportedOp, match="rank 0 changed a tensor"):
            echelon.simulate(change_after_an_answer, 2, seed=seed, late_sends=True)


def reduce(group):
    return group.all_reduce(torch.arange(8.0))


def reduce_in_background(group):
    return group.all_reduce(torch.arange(8.0), async_op=True).wait()


@pytest.mark.parametrize("name", ["recursive_doubling", "ring"])
@pytest.mark.parametrize("call", ["in the foreground", "in the background"])
def test_a_plan_that_does_not_wait_for_its_sends_is_told_of(monkeypatch, name, call):
    """No test failed without this wait: simulated sends copied at once, and kernels buffer small tensors."""
    monkeypatch.setenv("ECHELON_ALL_REDUCE", name)
    program = reduce_in_background if "background" in call else reduce
    assert echelon.simulate(program, 4, late_sends=True).results[3].tolist() == [4.0 * i for i in range(8)]
    monkeypatch.setattr(interpreter, "_finish", lambda sends, _: sends.clear())
    expected = (
        r"changed a tensor before its send to rank \d.* in all_reduce.*, sent at .*test_overwritten.py:\d+: return"
    )
    with pytest.raises(echelon.UnsupportedOp, match=expected):
        echelon.simulate(program, 4, late_sends=True)


def test_wrong_values_do_not_hide_the_cause():
    def reuse(group):
        if group.rank == 0:
            values = torch.ones(4)
            work = group.isend(values, 1)
            values.zero_()
            group.send(values, 1)
            work.wait()
        else:
            assert group.recv(0).sum() + group.recv(0).sum() == 8, "the values are wrong"

    with pytest.raises(echelon.UnsupportedOp, match="rank 0 changed a tensor"):
        echelon.simulate(reuse, 2, late_sends=True)


def give_up(group):
    """After the death of rank 2 the others use their tensors again, though sends of the collective are not done."""
    values = torch.ones(4)
    try:
        while True:
            group.all_reduce(values)
    except echelon.PeerFailed:
        values.zero_()
    return values.sum().item()


def test_a_send_of_a_failed_collective_may_be_given_up():
    for seed in range(8):
        for at_op in (1, 5, 8):
            kill = [echelon.Kill(2, at_op=at_op)]
            for network in (None, SLOW):
                run = echelon.simulate(give_up, 4, seed=seed, faults=kill, network=network, late_sends=True)
                assert run.results == [0.0, 0.0, None, 0.0]


def test_with_faults_an_overwritten_tensor_is_told_of_as_well():
    with pytest.raises(echelon.UnsupportedOp, match="rank 0 changed a tensor"):
        echelon.simulate(change_too_early, 3, faults=[echelon.Kill(2, at=0.0)], late_sends=True)


def test_late_sends_are_refused_with_memory():
    with pytest.raises(echelon.LaunchError, match="late_sends=True and memory=True: leave one out"):
        echelon.simulate(change_in_time, 2, late_sends=True, memory=True)


def change_in_time(group):
    values = torch.full((4,), float("nan"))  # is not equal to itself, but its bits are
    if group.rank == 0:
        group.isend(values, 1).wait()
        return values.zero_()
    return group.recv(0)


def test_one_that_is_changed_afterwards_is_not():
    assert echelon.simulate(change_in_time, 2, network=SLOW).results[1].isnan().all()
    assert echelon.simulate(change_in_time, 2, late_sends=True).results[1].isnan().all()


def change_what_came(group):
    if group.rank == 0:
        values = torch.ones(4)
        group.send(values, 1)
        assert values.tolist() == [1.0] * 4
    else:
        group.recv(0).zero_()


def test_the_receiver_may_change_what_it_got():
    for seed in range(4):
        echelon.simulate(change_what_came, 2, seed=seed, network=SLOW)
        echelon.simulate(change_what_came, 2, seed=seed, late_sends=True)


def reduced(group, ends):
    """Changes a tensor of an asynchronous collective, once it `ends` by one of several ways."""
    values = torch.ones(4)
    work = group.all_reduce(values, async_op=True)
    if ends == "by a wait":
        work.wait()
    elif ends == "by polling":
        while not work.is_completed():
            pass
    elif ends == "by a later one":
        group.all_reduce(values, async_op=True).wait()
        values.div_(2)
    elif ends == "by an answer":
        group.sendrecv(torch.ones(1), 1 - group.rank, 1 - group.rank)
    values.mul_(2)
    return work.wait().tolist()


@pytest.mark.parametrize("ends", ["by a wait", "by polling", "by a later one"])
def test_a_tensor_of_a_collective_that_has_ended_may_be_changed(ends):
    assert echelon.simulate(reduced, 2, (ends,), late_sends=True).results == [[4.0] * 4] * 2


def test_a_tensor_that_is_changed_before_its_collective_begins_is_told_of():
    """The collective took the changed values in each simulation. On processes it may take either."""
    what = r"all_reduce\(sum\) of float32\[4\], #1 of group 'world' at .*:\d+"
    for seed in range(8):
        with pytest.raises(echelon.UnsupportedOp, match=rf"rank \d changed a tensor before {what} had begun"):
            echelon.simulate(reduced, 2, ("not",), seed=seed, late_sends=True)


def test_an_answer_is_no_end_of_a_collective():
    """In some orders the collective has ended by then."""
    with pytest.raises(echelon.UnsupportedOp, match=r"rank \d changed a tensor before"):
        echelon.explore(reduced, 2, range(8), ("by an answer",), late_sends=True)


def reduced_by_torch(is_early):
    dist.init_process_group("gloo")
    grads = [torch.ones(3) for _ in range(3)]
    works = [dist.all_reduce(grad, async_op=True) for grad in grads]
    if is_early:
        grads[2].mul_(2)
    for work in works:
        work.wait()
    gathered = [torch.empty(3) for _ in range(2)]
    dist.all_gather(gathered, grads[0])
    return gathered[1].tolist()


def test_collectives_of_torch_are_compared_as_well():
    assert echelon.simulate(reduced_by_torch, 2, (False,), late_sends=True).results == [[2.0] * 3] * 2
    with pytest.raises(echelon.UnsupportedOp, match=r"rank 0 changed a tensor before all_reduce.*, #3 of group"):
        echelon.simulate(reduced_by_torch, 2, (True,), late_sends=True)


def give_up_beside(group):
    """After the death of rank 2 the others use their tensors again, though collectives have not begun."""
    values = torch.ones(4)
    try:
        while True:
            work, later = (group.all_reduce(values, async_op=True) for _ in range(2))
            work.wait()
            later.wait()
    except echelon.PeerFailed:
        values.zero_()
    return values.sum().item()


def test_a_collective_of_a_failed_group_may_be_given_up():
    for at_op in (1, 2, 5):
        kill = [echelon.Kill(2, at_op=at_op)]
        run = echelon.simulate(give_up_beside, 3, faults=kill, late_sends=True)
        assert run.results == [0.0, 0.0, None]
