"""When no rank can go on, everybody is told at once who waits for whom, and where."""

import ctypes
import gc
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import echelon
from echelon.pipeline import Pipeline


def everybody_receives_first(group):
    group.recv((group.rank + 1) % group.world_size, tag=5)


def test_a_cycle_is_pointed_out_with_operation_and_line_of_every_rank():
    began = time.monotonic()
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(everybody_receives_first, 3)
    assert time.monotonic() - began < 20
    message = str(caught.value)
    assert "rank 0 -> rank 1 -> rank 2 -> rank 0" in message
    line = everybody_receives_first.__code__.co_firstlineno + 1
    for rank in range(3):
        pattern = (
            rf"rank {rank} waits for rank {(rank + 1) % 3} in receive from rank {(rank + 1) % 3}, tag 5, at .*:{line}"
        )
        assert re.search(pattern, message), message
    assert message.count("group.recv((group.rank + 1) % group.world_size, tag=5)") == 3


def leads_to_a_cycle(group):
    group.recv((1, 2, 1)[group.rank])


def test_a_rank_that_waits_for_a_cycle_is_no_part_of_it():
    with pytest.raises(echelon.DeadlockError, match="wait for each other, rank 1 -> rank 2 -> rank 1: let one"):
        echelon.simulate(leads_to_a_cycle, 3)


def one_skips_the_last_operation(group):
    group.barrier()
    if group.rank != 1:
        group.broadcast(torch.ones(2))


def test_a_missing_broadcast_that_nobody_waits_for_is_found():
    with pytest.raises(
        echelon.CollectiveMismatch, match=r"rank 1 has returned without broadcast\(src=0\).*which rank 0 called at .*:"
    ) as caught:
        echelon.simulate(one_skips_the_last_operation, 2)
    assert f"{__file__}:{one_skips_the_last_operation.__code__.co_firstlineno + 3}: every" in str(caught.value)


def wait_for_one_that_returned(group):
    if group.rank != 1:
        group.recv(1)


def test_waiting_for_a_rank_that_returned_names_both():
    with pytest.raises(echelon.DeadlockError, match="rank 0 waits for rank 1, which has returned") as caught:
        echelon.simulate(wait_for_one_that_returned, 3)
    assert "rank 1 has returned, after no call" in str(caught.value)
    assert "rank 2 waits for rank 1 in receive from rank 1" in str(caught.value)


def returns_too_early(group):
    group.barrier()
    if group.rank == 0:
        return group.send(torch.ones(3), 2)
    return group.recv((group.rank + 1) % 3, tag=9)


def test_a_rank_that_returned_is_named_with_its_last_call_and_where_that_was():
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(returns_too_early, 3)
    line = returns_too_early.__code__.co_firstlineno + 3
    assert re.search(
        rf"rank 0 has returned, after send to rank 2, tag 0 of float32\[3\] at .*:{line}$", str(caught.value), re.M
    )


def call_once_too_often(group):
    for step in range(2):
        group.barrier()
        if group.rank == 1 and step == 0:
            group.barrier()
        group.barrier()


@pytest.mark.parametrize("collectives", ["whole", "messages"])
def test_the_first_call_at_other_lines_is_named(collectives):
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(call_once_too_often, 2, collectives=collectives)
    first = call_once_too_often.__code__.co_firstlineno
    here, there = f"{__file__}:{first + 4} on rank 1", f"{__file__}:{first + 5} on rank 0"
    assert f"; their lines differ from #2 on, {here} and {there}\n" in str(caught.value)


def nobody_waits_for_its_work(group):
    if group.rank == 0:
        group.all_reduce(torch.ones(1), async_op=True)


def test_what_was_begun_and_cannot_end_is_named_with_the_line_where_it_began():
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(nobody_waits_for_its_work, 2)
    line = nobody_waits_for_its_work.__code__.co_firstlineno + 2
    assert re.search(
        rf"rank 0, in all_reduce\(sum\) of float32\[1\], #1.*, waits for rank 1; begun at .*:{line}", str(caught.value)
    )
    assert "at the end of its function" in str(caught.value)


def poll_for_ever(group):
    work = group.irecv(1 - group.rank)
    while not work.is_completed():
        pass


def test_polling_for_what_never_comes_is_a_deadlock():
    with pytest.raises(echelon.DeadlockError, match="wait for each other"):
        echelon.simulate(poll_for_ever, 2)


def look_at_the_time_for_ever(group):
    while group.backend.now() < 1.0:
        pass


def test_looking_at_the_time_while_it_stands_still_is_a_deadlock(monkeypatch):
    monkeypatch.setattr("echelon.simulation.boundary._LOOKS", 1000)
    with pytest.raises(echelon.DeadlockError, match=r"rank 0 has read the clock 1,000 times in a row at 0 s"):
        echelon.simulate(look_at_the_time_for_ever, 1)


def test_looking_at_the_time_ends_where_computing_takes_time():
    run = echelon.simulate(look_at_the_time_for_ever, 1, costs=echelon.simulation.Measured(factor=1e4))
    assert run.elapsed >= 1.0


def compute_nothing(group):
    with group.backend.compute("step"):
        pass


def look_between_calls(group, call):
    for _ in range(30):
        for _ in range(50):
            group.backend.now()
        call(group)
    return True


@pytest.mark.parametrize("call", [echelon.ProcessGroup.barrier, compute_nothing])
def test_looking_at_the_time_between_calls_is_allowed(monkeypatch, call):
    monkeypatch.setattr("echelon.simulation.boundary._LOOKS", 200)
    assert echelon.simulate(look_between_calls, 2, (call,)).results == [True, True]


def poll_two(group):
    if group.rank:
        group.barrier()
        group.send(torch.ones(1), 0, tag=2)
        return None
    works = [group.irecv(1, tag=tag) for tag in (1, 2)]
    begun = group.backend.lanes.start(group.barrier, "barrier beside", 7)
    while not any(work.is_completed() for work in works):
        pass
    begun.wait()
    group.backend.messages.cancel(works[0])
    return works[1].wait().item()


@pytest.mark.parametrize("seed", range(5))
def test_polling_lets_the_others_go_on(seed):
    assert echelon.simulate(poll_two, 2, seed=seed).results[0] == 1.0


def poll_often(group):
    """Rank 0 looks at each of its receives before it sends what the other rank waits for."""
    for _ in range(150):
        if group.rank == 0:
            work = group.irecv(1)
            work.is_completed()
            group.send(torch.ones(1), 1)
            work.wait()
        else:
            group.recv(0)
            group.send(torch.ones(1), 0)
    receives = [group.irecv(1 - group.rank, tag=number) for number in range(150)]
    assert [work.is_completed() for work in receives] == [False] * 150
    for number, work in enumerate(receives):
        group.send(torch.ones(1), 1 - group.rank, tag=number)
        work.wait()
    return number


def test_looks_at_works_between_other_acts_are_no_loop():
    """The hundredth look of a rank at one instant blocked, which was a deadlock of ranks that have none."""
    assert echelon.simulate(poll_often, 2).results == [149, 149]


def poll_futures(group):
    dist.init_process_group("gloo")
    tensors = [torch.ones(1) for _ in range(3)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    while not futures[0].done():
        pass
    rest = torch.futures.collect_all(futures[1:])
    while not rest.done():
        pass
    return [tensor.item() for tensor in tensors]


def test_polling_a_future_lets_the_others_go_on():
    """It looped for ever, without an error."""
    assert echelon.simulate(poll_futures, 2, network="1GbE").results == [[2.0] * 3] * 2


def poll_in_turn(group, tags):
    """Only the message with tag 2 is on its way: the other one is sent when this rank has seen that."""
    if group.rank:
        group.send(torch.ones(1), 0, tag=2)
        group.recv(0)
        group.send(torch.ones(1), 0, tag=1)
        return None
    works = [group.irecv(1, tag=tag) for tag in tags]
    while not (works[0].is_completed() or works[1].is_completed()):
        pass
    group.send(torch.ones(1), 1)
    return [work.wait().item() for work in works]


@pytest.mark.parametrize("tags", [(1, 2), (2, 1)])
def test_polling_one_work_in_turn_with_another_ends_when_either_does(tags):
    network = echelon.Network(latency=1.0)
    assert echelon.simulate(poll_in_turn, 2, (tags,), network=network).results[0] == [1.0, 1.0]


def wait_again(group):
    """Rank 1 comes to the collective after 5 s, and sends after 10 s."""
    if group.rank:
        for act in (lambda: group.all_reduce(torch.ones(1)), lambda: group.send(torch.ones(1), 0)):
            with pytest.raises(echelon.Timeout):
                group.recv(0, tag=7, timeout=5.0)
            act()
        return None
    work = group.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(echelon.Timeout):
        work.wait(1.0)
    group.irecv(1).wait(20.0)
    return group.backend.now(), work.is_completed()


def test_what_ends_after_its_wait_does_not_end_the_next_wait():
    assert echelon.simulate(wait_again, 2).results[0] == (pytest.approx(10.0, abs=0.1), True)


def cleans_up(group, cleaned):
    try:
        group.recv(1 - group.rank)
    except Exception:
        cleaned.append("caught")
    finally:
        cleaned.append(group.rank)


def test_programs_cannot_swallow_a_deadlock_but_may_clean_up():
    cleaned = []
    with pytest.raises(echelon.DeadlockError):
        echelon.simulate(cleans_up, 2, (cleaned,))
    assert sorted(cleaned) == [0, 1]


def fails_while_others_wait(group):
    if group.rank == 2:
        raise KeyError("no such layer")
    group.recv(2)


def test_an_error_comes_before_the_deadlock_that_it_causes():
    with pytest.raises(KeyError, match="no such layer") as caught:
        echelon.simulate(fails_while_others_wait, 3)
    line = fails_while_others_wait.__code__.co_firstlineno + 2
    assert caught.value.__notes__ == [f"raised on rank 2 of 3, at {__file__}:{line}"]


def fails_last(group):
    """Rank 1 has heard from rank 0 that it fails, and is faster to report that."""
    if group.rank == 1:
        raise echelon.PeerFailed(0, "no such layer")
    try:
        group.recv(1)
    except echelon.PeerFailed:
        raise KeyError("no such layer") from None


def test_the_first_cause_is_raised_however_late_it_comes():
    with pytest.raises(KeyError, match="no such layer") as caught:
        echelon.simulate(fails_last, 2)
    assert caught.value.__notes__[0].startswith("raised on rank 0 of 2, at ")


def interrupted(group):
    if group.rank == 0:
        raise KeyboardInterrupt
    group.barrier()


@pytest.mark.parametrize("function", [everybody_receives_first, fails_while_others_wait, interrupted, poll_for_ever])
def test_no_thread_is_left(function):
    before = threading.active_count()
    for seed in range(20):
        with pytest.raises(BaseException):  # noqa: B017
            echelon.simulate(function, 3 if function is not poll_for_ever else 2, seed=seed)
    assert threading.active_count() == before


def computes_for_ever(group):
    if group.rank == 0:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while True:
            sum(range(100))
    group.barrier()


def test_ctrl_c_ends_ranks_that_wait_and_one_that_computes():
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        echelon.simulate(computes_for_ever, 3)
    assert threading.active_count() == before


def computes_after_a_collective(group):
    group.all_reduce(torch.ones(4))
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # by the first rank that goes on
    while True:
        sum(range(100))


def test_ctrl_c_tells_ranks_whose_collective_has_ended_from_ranks_that_wait():
    with pytest.raises(KeyboardInterrupt) as caught:
        echelon.simulate(computes_after_a_collective, 3)
    (note,) = caught.value.__notes__
    assert note.count("is about to go on, at") == 2, note


def talks_from_a_thread_of_its_own(group):
    errors = []

    def talk():
        try:
            group.barrier()
        except echelon.UnsupportedOp as error:
            errors.append(str(error))

    thread = threading.Thread(target=talk, name="mine")
    thread.start()
    thread.join()
    return errors


def test_a_thread_of_the_programs_own_cannot_talk():
    (errors,) = echelon.simulate(talks_from_a_thread_of_its_own, 1).results
    assert errors == [] or "thread 'mine'" in errors[0]
    assert "create_group" in echelon.simulate(talks_from_a_thread_of_its_own, 2).results[0][0]


def resident_kib():
    """Returns the resident memory without the free memory that malloc keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


@pytest.mark.slow
def test_a_thousand_simulations_leak_nothing():
    def once(seed):
        with pytest.raises(echelon.DeadlockError):
            echelon.simulate(everybody_receives_first, 3, seed=seed)
        with pytest.raises(KeyError):
            echelon.simulate(fails_while_others_wait, 3, seed=seed)
        echelon.simulate(nobody_fails, 3, seed=seed)

    def left():
        return threading.active_count(), resident_kib(), len(gc.get_objects())

    for seed in range(50):
        once(seed)
    before = left()
    for seed in range(334):
        once(seed)
    after = left()
    assert after[0] == before[0]
    # torch leaves some bytes for each thread that computes, and CPython for each traceback: 0.5 to 2 KiB.
    assert (after[1] - before[1]) / (3 * 334) < 4, "KiB for each simulation"
    assert after[2] - before[2] < 500


def nobody_fails(group):
    return group.all_reduce(torch.ones(8), async_op=True).wait()


def passes_to_the_wrong_side():
    dist.init_process_group("gloo")
    after = (dist.get_rank() + 1) % dist.get_world_size()
    ops = [dist.P2POp(dist.isend, torch.ones(4), after), dist.P2POp(dist.irecv, torch.zeros(4), after)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def test_receives_of_the_wrong_rank_are_named_beside_the_messages():
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(passes_to_the_wrong_side, 3)
    text = str(caught.value)
    assert "their receives are of other ranks or tags than the messages: make both sides agree" in text
    assert "rank 0 has not received a message from rank 2, tag 0, but waits for one from rank 1, tag 0" in text


def test_what_was_sent_with_another_tag_is_named():
    def program(group):
        if group.rank == 0:
            group.recv(1, tag=5)
        else:
            for tag in range(10):
                group.send(torch.ones(1), 0, tag=tag + 10)

    with pytest.raises(echelon.DeadlockError, match="rank 0 waits for rank 1 in receive from rank 1, tag 5") as caught:
        echelon.simulate(program, 2)
    assert "rank 0 has not received a message from rank 1, tag 10\n" in str(caught.value)
    assert str(caught.value).endswith("and 2 more messages that were not received")


def test_groups_are_told_apart():
    def program(group):
        pair = group.subgroup([0, 1], name="pair")
        (pair if group.rank == 0 else group).barrier()

    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(program, 2)
    assert "rank 0 waits for rank 1 in barrier, #1 by dissemination, of group 'pair', at" in str(caught.value)
    assert "rank 1 waits for rank 0 in barrier, #1 by dissemination, at" in str(caught.value)


def test_a_pipeline_that_waits_says_for_what():
    def program(group):
        pipe = Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), group, "1f1b", 2, nn.functional.mse_loss)
        if group.rank == 0:
            pipe.step(torch.ones(4, 2))

    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(program, 2)
    assert "in receive from rank 1, the gradient of microbatch 0 for stage 0, at" in str(caught.value)
    assert "has not received a message from rank 0, the input of microbatch 1 for stage 1" in str(caught.value)


# Sends of torch.distributed, which wait for their receives


def both_send_first(start):
    dist.init_process_group("gloo")
    other, values = 1 - dist.get_rank(), torch.ones(2)
    start(values, other)
    dist.recv(values, other)


@pytest.mark.parametrize("start", [dist.send, lambda values, other: dist.isend(values, other).wait()])
def test_two_ranks_of_torch_that_both_send_first_wait_for_each_other(start):
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(both_send_first, 2, (start,))
    first, *lines = str(caught.value).splitlines()
    advice = "let one of them receive before it sends, or start the sends with isend"
    assert first.endswith(f"rank 0 -> rank 1 -> rank 0: {advice}")
    assert lines[0].startswith("  rank 0 waits for rank 1 in send to rank 1, tag 0, at ")
    assert lines[1].startswith("  rank 1 waits for rank 0 in send to rank 0, tag 0, at ")


def differ_in_a_schedule(names, num_steps):
    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.ones(8, 4)
    stage = PipelineStage(torch.nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = get_schedule_class(names[rank])(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    for _ in range(num_steps[rank]):
        schedule.step(x) if rank == 0 else schedule.step(target=x)


@pytest.mark.parametrize(("names", "num_steps"), [(("GPipe", "1F1B"), (1, 1)), (("1F1B", "1F1B"), (2, 1))])
def test_ranks_that_differ_in_a_schedule_of_torch_are_told_so(names, num_steps):
    """The program has no order of messages of its own to change."""
    with pytest.raises(echelon.DeadlockError, match="make the same schedule on every rank") as caught:
        echelon.simulate(differ_in_a_schedule, 2, (names, num_steps))
    assert "let one of them" not in str(caught.value)


def exchange():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sent, got = torch.full((2,), float(rank)), torch.zeros(2)
    work = dist.isend(sent, 1 - rank)
    dist.recv(got, 1 - rank)
    work.wait()
    for each in dist.batch_isend_irecv([dist.P2POp(dist.isend, got, 1 - rank), dist.P2POp(dist.irecv, sent, 1 - rank)]):
        each.wait()
    polled = dist.isend(sent, 1 - rank)
    dist.recv(got)  # from any rank
    while not polled.is_completed():
        pass
    return sent.tolist(), got.tolist()


def test_sends_of_torch_end_with_their_receives():
    assert echelon.simulate(exchange, 2).results == [([0.0, 0.0], [1.0, 1.0]), ([1.0, 1.0], [0.0, 0.0])]


def send_to_a_killed_rank():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        with pytest.raises(echelon.PeerFailed, match="rank 1 failed: killed at 1 s"):
            dist.send(torch.ones(2), 1)
        return "told"
    return dist.recv(torch.ones(3), 0, tag=7)


def test_a_send_of_torch_ends_when_its_receiver_is_killed():
    run = echelon.simulate(send_to_a_killed_rank, 2, faults=[echelon.Kill(1, at=1.0)])
    assert run.results[0] == "told"


def waits_for_its_collective_while_the_other_receives():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
    dist.recv(torch.ones(2), 0)


def test_a_rank_that_waits_for_its_own_collective_is_named_once():
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(waits_for_its_collective_while_the_other_receives, 2)
    assert "with rank 0 in a collective and rank 1 in a message" in str(caught.value)  # not "ranks 0 and 0"


def add_up(group):
    group.all_reduce(torch.ones(2))


def add_up_in_another_group(group):
    groups = [group.subgroup([0, 1]) for _ in range(2)]
    if group.rank:
        groups.reverse()
    add_up(groups[0])


def test_the_caller_of_a_helper_is_named():
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(add_up_in_another_group, 2)
    line = add_up_in_another_group.__code__.co_firstlineno + 4
    assert str(caught.value).count(f"group.all_reduce(torch.ones(2)), called from {__file__}:{line}") == 2
