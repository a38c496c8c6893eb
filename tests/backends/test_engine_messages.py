"""Messages that an engine carries: what NCCL does with tensors of a GPU, here done by Gloo with those of the CPU."""

import os
import random
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import echelon
from echelon.backends.torch_distributed import backend as torch_backend
from echelon.backends.torch_distributed import messages
from echelon.backends.torch_distributed.engine import Engine
from echelon.backends.torch_distributed.messages import EngineChannel, Route
from echelon.backends.work import Work
from echelon.group.group import ProcessGroup
from echelon.pipeline import Pipeline
from echelon.pipeline.run.transfer import PendingSends
from echelon.testing import check_backend, clause_names, ranks_in_threads
from tests.backends.test_contract import gloo_world as connected_world
from tests.helpers.forked_ranks import run_forked
from tests.helpers.models import gradients
from tests.helpers.one_process import make_batch, make_model, train_alone
from tests.helpers.stream_log import StreamLog
from tests.helpers.worlds import gloo_world, on_every_rank

RENDEZVOUS = {
    "writes_where_told",
    "combines_where_told",
    "what_need_not_fit_comes_nevertheless",
    "tags_never_mix",
    "send_does_not_wait_for_the_receiver",
    "a_timeout_withdraws_the_receive",
    "a_closed_peer_is_named",
    "receives_from_any",
    "each_death_is_told_to_one_receive_from_any",
    "lanes_run_beside",
}
"""Clauses by which a send is done before a receive has come: no engine keeps a message of a device that long."""


@pytest.fixture
def carried(monkeypatch):
    """Has Gloo carry messages, as NCCL does; gives the sizes of what it sent, in bytes."""
    monkeypatch.setattr(torch_backend, "MESSAGES", {"gloo": frozenset({"cpu"})})
    return count_sent(monkeypatch)


def count_sent(monkeypatch):
    sizes, send = [], Engine.send

    def counted(engine, data, dst):
        sizes.append(len(data))
        send(engine, data, dst)

    monkeypatch.setattr(Engine, "send", counted)
    return sizes


@pytest.mark.parametrize("clause", [name for name in clause_names() if name not in RENDEZVOUS])
def test_keeps_the_contract(clause, carried):
    check_backend(ranks_in_threads(connected_world), [clause])


@pytest.mark.parametrize("clause", clause_names())
def test_what_stays_on_the_cpu_goes_over_tcp_as_ever(clause, monkeypatch):
    monkeypatch.setattr(torch_backend, "MESSAGES", {"gloo": frozenset({"cuda"})})
    sizes = count_sent(monkeypatch)
    check_backend(ranks_in_threads(connected_world), [clause])
    assert sizes == []


def test_messages_in_any_order_meet_by_their_tags_and_nothing_waits_for_ever(carried):
    """Each rank starts its sends in one order, its receives in another, and posts most of them late."""

    def act(group):
        rng, others = random.Random(group.rank), [rank for rank in range(3) if rank != group.rank]
        messages = [(peer, tag) for peer in others for tag in range(8)]
        sent = [
            group.isend(torch.full((tag, 3), 10.0 * group.rank + tag), peer, tag)
            for peer, tag in rng.sample(messages, len(messages))
        ]
        expected = rng.sample(messages, len(messages))
        receipts = [group.irecv(peer, tag) for peer, tag in expected]
        found = [work.wait(20.0) for work in receipts]
        for work in sent:
            work.wait(20.0)
        return all(
            torch.equal(tensor, torch.full((tag, 3), 10.0 * peer + tag))
            for (peer, tag), tensor in zip(expected, found, strict=True)
        )

    with gloo_world(3) as world:
        assert on_every_rank(world, act) == [True] * 3
    assert len(carried) == 3 * 2 * 7  # what is empty needs no engine


def send_after_rank_0_has_left(group, carried):
    """Rank 1 sends to rank 2 first when the process of rank 0 has ended, and its store with it."""
    if group.rank == 0:
        for peer in (1, 2):
            group.send(torch.tensor([os.getpid()]), peer)
        return None
    ended = os.pidfd_open(group.recv(0).item())
    assert select.select([ended], [], [], 20.0)[0]
    os.close(ended)
    if group.rank == 2:
        return group.recv(1).tolist()
    group.send(torch.ones(1), 2)
    return carried


def test_two_ranks_need_no_rank_0_to_connect(carried):
    assert run_forked(send_after_rank_0_has_left, 3, carried, backend="gloo") == {1: [4], 2: [1.0]}


def test_a_receive_says_where_the_message_is_to_be_and_what_does_not_fit_leaves_the_next_one(carried):
    def act(group):
        if group.rank == 0:
            works = [group.isend(torch.full((4,), 7.0), 1, tag) for tag in (0, 1, 2)]
            return [work.wait(20.0) for work in works]
        place = torch.zeros(6)
        with pytest.raises(echelon.SizeMismatch, match=r"float32\[4\]"):
            group.recv(0, 2, out=torch.zeros(3))
        kept = group.recv(0, 1, out=place[1:5])
        added = group.backend.messages.irecv(0, group._tag(0), out=place[1:5], combine=torch.Tensor.add_).wait(20.0)
        return place.tolist(), kept.data_ptr() == added.data_ptr() == place[1:].data_ptr()

    with gloo_world(2) as world:
        assert on_every_rank(world, act)[1] == ([0.0, 14.0, 14.0, 14.0, 14.0, 0.0], True)


def test_a_receive_from_any_rank_and_one_that_is_withdrawn(carried):
    def act(group):
        if group.rank == 0:
            with pytest.raises(echelon.Timeout):
                group.recv(1, 5, timeout=0.01)
            group.barrier()
            found = [group.recv_any(tag=5) for _ in range(2)]
            return sorted((came.src, came.tensor.item()) for came in found)
        group.barrier()
        return group.send(torch.tensor([float(group.rank)]), 0, 5)

    with gloo_world(3) as world:
        assert on_every_rank(world, act)[0] == [(1, 1.0), (2, 2.0)]


def test_a_peer_that_gives_up_while_the_engine_waits_for_it_is_named(carried, monkeypatch):
    """One that has announced a message and answered for it, and then never comes to the engine."""
    both = threading.Event()

    def never(channel, tensor, seconds, look):
        both.set()
        raise RuntimeError("the GPU has fallen off the bus")

    monkeypatch.setattr(EngineChannel, "send", never)

    def act(group):
        if group.rank == 0:
            work = group.isend(torch.ones(5), 1)
            assert both.wait(20.0)
            with pytest.raises(RuntimeError, match="fallen off"):
                work.wait(20.0)
            group.backend.abort("RuntimeError: the GPU has fallen off the bus")
            return None
        with pytest.raises(echelon.PeerFailed, match="fallen off the bus") as caught:
            group.recv(0)
        return caught.value.rank

    with gloo_world(2) as world:
        assert on_every_rank(world, act) == [None, 0]


def test_messages_of_a_channel_begin_in_the_order_of_their_answers_however_these_arrive():
    channel, begun = EngineChannel(None, frozenset({"cpu"}), Route(0, 0, 1), -2), []
    for number in (2, 3, 1, 4):
        channel.in_order(number, lambda number=number: begun.append(number))
    assert begun == [1, 2, 3, 4]


def test_a_step_waits_at_its_end_for_what_it_sent_and_not_before():
    """A device's stream would else stand still at every send, until the other rank has taken it."""
    with gloo_world(1) as (backend,):
        joined, outbox = [], PendingSends(ProcessGroup(backend))
        sent = Work(None, "send")
        sent.when_taken(lambda: joined.append(True))
        sent.complete()
        with outbox:
            outbox.add([sent])
            outbox.look()
            assert not joined
            outbox.flush()
        assert joined


def test_closing_waits_for_what_was_sent_and_says_so_if_nobody_takes_it(carried):
    with gloo_world(2) as world:
        kept = world[0].messages.isend(torch.ones(3), 1)
        with pytest.raises(echelon.Timeout, match="close of rank 0: a message for the engine was not received in time"):
            world[0].close(timeout=0.05)
        assert kept.exception() is not None
    with gloo_world(2) as world, ThreadPoolExecutor(1) as thread:
        work = world[0].messages.isend(torch.ones(3), 1)
        received = thread.submit(world[1].messages.recv, 0)
        world[0].close()
        assert work.result() is None
        assert received.result().tolist() == [1.0] * 3


def die_when_connecting(group):
    """Rank 1 is killed when both have agreed on a message, and rank 0 connects to it."""
    if group.rank == 1:
        messages.greet = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.recv(1) if group.rank == 0 else group.send(torch.ones(3), 0)
    except echelon.PeerFailed as error:
        return error.rank
    return None


def test_a_peer_that_dies_while_the_engine_connects_is_named(carried):
    assert run_forked(die_when_connecting, 2, backend="gloo") == {0: 1}


def test_a_message_is_queued_beside_the_caller_s_stream_and_joined_by_who_takes_its_result(carried):
    with gloo_world(2) as world:

        def act(backend):
            log = []
            backend._engines.scope = lambda _: StreamLog(log)
            work = backend.messages.isend(torch.ones(2), 1) if backend.rank == 0 else backend.messages.irecv(0)
            work.wait(20.0)
            return log

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(act, world)) == [[("queued", False), ("joined", True)]] * 2


def train(group, schedule, num_chunks):
    """Trains two steps; returns the loss, the gradients of this rank, and how many messages the engine carried."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = count_sent(patch)
        model = make_model(group.world_size * num_chunks)
        pipe = Pipeline(model, group, schedule, 6, nn.functional.mse_loss, num_chunks=num_chunks)
        inputs, target = make_batch(12)
        losses = [pipe.step(inputs, target=target).loss.item() for _ in range(2)]
    named = {name: parameter.grad.tolist() for name, parameter in pipe.named_parameters()}
    return losses, named, len(sizes)


@pytest.mark.parametrize(("schedule", "world_size", "num_chunks"), [("1f1b", 2, 1), ("interleaved-1f1b", 3, 2)])
def test_a_pipeline_sends_what_its_stages_make_by_the_engine(schedule, world_size, num_chunks, monkeypatch):
    monkeypatch.setattr(torch_backend, "MESSAGES", {"gloo": frozenset({"cpu"})})
    results = run_forked(train, world_size, schedule, num_chunks, backend="gloo")
    model = make_model(world_size * num_chunks)
    wanted = [train_alone(model, make_batch(12), 6).item() for _ in range(2)]
    found = {}
    for losses, named, _ in results.values():
        assert losses == pytest.approx(wanted, rel=1e-12)
        found |= named
    expected = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(torch.tensor(found[name], dtype=gradient.dtype), gradient)
    assert sum(count for *_, count in results.values()) == 2 * 2 * 6 * (world_size * num_chunks - 1)
