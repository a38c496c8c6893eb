"""A wait for asynchronous work that ends too early says where the other ranks are, as a blocking call does.

The ranks hear of it as the fault of the rank that was waited for, not of the one that gave up.
"""

import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import echelon
from echelon.backends import work
from echelon.data_parallel.hooks import CompressTo
from echelon.errors import Timeout, failure_of
from echelon.pipeline import Pipeline
from echelon.purposes import BACKWARD, FORWARD, Purpose
from tests.group.test_whereabouts import stay
from tests.helpers.forked_ranks import run_forked

HERE = r"[^ ]*test_late_works\.py:\d+"
THERE = r"[^ ]*test_whereabouts\.py:\d+"
STAY = 7
TOLD = 8


def begin(group, kind):
    match kind:
        case "all_reduce":
            return group.all_reduce(torch.ones(10), async_op=True)
        case "irecv":
            return group.irecv(0)
        case "irecv_any":
            return group.irecv_any()


def wait_briefly(group, kind):
    """Rank 0 is in a receive; rank 1 waits for a short time and then once more, when rank 0 has come."""
    if group.rank == 0:
        stay(group)
        if kind == "all_reduce":
            group.all_reduce(torch.ones(10))
        else:
            group.send(torch.ones(10), 1)
        return None
    group.recv(0, tag=TOLD)
    work = begin(group, kind)
    with pytest.raises(Timeout) as caught:
        work.wait(0.2)
    group.send(torch.ones(1), 0, tag=STAY)
    work.wait()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["all_reduce", "irecv", "irecv_any"])
def test_a_wait_says_where_the_other_rank_is_and_the_work_goes_on(on_backend, kind):
    message = on_backend(wait_briefly, 2, kind)[1]
    assert re.search(
        rf"not done after \d+\.\d s: .*rank 0, which is in receive from rank 1, tag {STAY} of group 'world' at {THERE}",
        message,
    ), message


def skip_a_backward(group):
    """Rank 0 leaves a backward out, and waits for a message."""
    seconds, group.timeout = group.timeout, 1.0
    model = echelon.DDP(nn.Linear(3, 3), group, bucket_mb=1e-5)
    group.timeout = seconds
    model(torch.ones(2, 3)).sum().backward()
    if group.rank == 0:
        waiting = group.irecv(1, tag=STAY)
        waiting.wait()
        with pytest.raises(echelon.PeerFailed) as failed:
            model(torch.ones(2, 3)).sum().backward()
        return failed.value.rank, str(failed.value)
    with pytest.raises(Timeout) as caught:
        model(torch.ones(2, 3)).sum().backward()
    group.send(torch.ones(1), 0, tag=STAY)
    return caught.value.ranks, str(caught.value)


def test_a_backward_that_one_rank_skips_says_where_that_rank_is(on_backend):
    (blamed, told), (late, message) = on_backend(skip_a_backward, 2)
    place = rf"waited \d+\.\d s for rank 0, which is in receive from rank 1, tag {STAY} of group 'world' at {HERE}"
    assert list(late) == [0]
    assert re.search(rf"rank 1 in DDP's backward of step \d+ of group 'world'.*{place}", message)
    assert blamed == 0
    assert re.search(rf"it kept rank 1 waiting, which gave up: .*{place}", told), told


def stopped_in_a_step(group, kind):
    """The last rank is stopped in a step until the others have given up, and has to say why its step has failed."""
    victim = group.world_size - 1
    if kind == "pipeline":
        stages = [nn.Linear(3, 3) for _ in range(group.world_size)]
        pipe = Pipeline(stages, group, schedule="gpipe", num_microbatches=2, loss_fn=nn.functional.mse_loss)
        ones = torch.ones(4, 3)
        inputs, target = ((ones,) if group.rank == 0 else ()), (ones if group.rank == victim else None)
        step = lambda: pipe.step(*inputs, target=target)  # noqa: E731
    else:
        model = echelon.DDP(nn.Linear(3, 3), group, hook=CompressTo(torch.bfloat16) if kind == "hook" else None)
        step = lambda: model(torch.ones(2, 3)).sum().backward()  # noqa: E731
    step()
    pid = group.all_gather_object(os.getpid())[victim]
    if group.rank == victim:
        os.kill(pid, signal.SIGSTOP)
    try:
        step()
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("ddp", "shm"),
        pytest.param("ddp", "tcp", marks=pytest.mark.slow),
        pytest.param("hook", "tcp", marks=pytest.mark.slow),
        pytest.param("pipeline", "shm", marks=pytest.mark.slow),
        pytest.param("pipeline", "tcp", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_of_a_step_name_the_one_that_is_stopped(kind, backend):
    """Also the stopped rank, when it goes on: it blames no rank that was healthy."""
    num_ranks = 3 if kind == "pipeline" else 2
    *others, victim = run_forked(stopped_in_a_step, num_ranks, kind, backend=backend, rank_timeout=1.0).values()
    stopped = (
        f"rank {num_ranks - 1},? (which )?did not answer rank \\d within \\d s: computing without a pause, or stopped"
    )
    assert any(name == "Timeout" for name, _ in others), others
    for name, message in others:
        assert name in ("Timeout", "PeerFailed")
        assert re.search(stopped, message), message
    name, message = victim
    assert name == "PeerFailed"
    assert message.startswith(f"rank {num_ranks - 1} failed: it kept rank "), message
    assert re.search(stopped, message), message


def test_a_rank_that_gives_up_blames_the_one_that_it_waited_for_if_there_is_one():
    assert failure_of(Timeout("late", (2,)), 1).rank == 2
    assert failure_of(Timeout("late", (0, 2)), 1).rank == 1
    assert failure_of(Timeout("late"), 1).reason == "Timeout: late"
    assert failure_of(ValueError("bad"), 1).reason == "ValueError: bad"


def test_a_failure_without_a_message_is_told_by_its_type_alone():
    """Ctrl-C in a collective was told as "KeyboardInterrupt: "."""
    assert failure_of(KeyboardInterrupt(), 1).reason == "KeyboardInterrupt"


@pytest.mark.parametrize(("purpose", "waits"), [(Purpose(BACKWARD), True), (Purpose(FORWARD), True), (None, False)])
def test_a_thread_that_sleeps_in_torchs_ddp_waits_for_its_operations_alone(monkeypatch, purpose, waits):
    """Beside a backward that a GPU computes, one of the program's own goes on."""
    monkeypatch.setattr(work, "is_in_ddp", lambda _: True)
    monkeypatch.setattr(work, "_ASLEEP_SECONDS", 0.0)
    done = threading.Event()
    sleeper = threading.Thread(target=done.wait)
    sleeper.start()
    try:
        flight = SimpleNamespace(thread=sleeper.ident, purpose=purpose)
        deadline = time.monotonic() + 5.0
        while not (seen := work.is_waited_for(flight)) and waits and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen is waits
    finally:
        done.set()
        sleeper.join()
