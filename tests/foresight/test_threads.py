"""Threads that a recorded program starts: they make and move tensors, and an error of theirs ends the recording."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from echelon import DeadlockError, UnsupportedOp, foresee
from echelon.foresight.trace import Kernel
from echelon.simulation import watchdog


def train(batches):
    """Trains a layer for two steps."""
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, batch in zip(range(2), batches, strict=False):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def batches_by_a_queue(make):
    batches = queue.Queue(2)

    def fill():
        while True:
            batches.put(make())

    threading.Thread(target=fill).start()
    return iter(batches.get, None)


def batches_by_a_pool(make):
    with ThreadPoolExecutor(2) as pool:
        ahead = pool.submit(make)
        while True:
            batch, ahead = ahead.result(), pool.submit(make)
            yield batch


def batches_by_no_thread(make):
    while True:
        yield make()


def pinned():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    return torch.randn(4, 8).pin_memory().to("cuda", non_blocking=True)


def on_the_gpu():
    with torch.cuda.stream(torch.cuda.Stream()):
        return torch.randn(4, 8, device="cuda") + torch.arange(8).cuda()


def of_values():
    x = torch.tensor([[0.0] * 8, [2.0] * 8] * 4)
    assert x.tolist()[1] == [2.0] * 8
    return x[x.sum(1) > 1].to(0)


@pytest.mark.parametrize("make", [pinned, on_the_gpu, of_values])
@pytest.mark.parametrize("batches", [batches_by_a_queue, batches_by_a_pool])
def test_batches_of_a_thread_are_tensors_of_the_gpu(batches, make):
    def program(batches):
        def checked():
            for each in batches(make):
                assert each.is_cuda
                assert each.device == torch.device("cuda", 0)
                assert not each.requires_grad
                yield each

        train(checked())

    found = foresee(program, 1, (batches,))
    assert [each.partition(" at ")[0] for each in found.assumptions] == [
        "kernels and copies in threads of the program take no time, as those"
    ]
    assert "test_threads.py:" in found.assumptions[0]
    kernels = [each.name for each in found.traces[0].entries if isinstance(each, Kernel)]
    expected = foresee(lambda: train(batches_by_no_thread(lambda: torch.randn(4, 8).cuda())), 1)
    assert kernels == [each.name for each in expected.traces[0].entries if isinstance(each, Kernel)]
    assert found.live_memory == expected.live_memory


def test_threads_compute_beside_their_rank():
    """Of torch's own mode, a thread would see the kernel of another one, whose tensors are on the meta device."""

    def program():
        weight = torch.randn(8, 8, device="cuda")
        has_ended, devices = threading.Event(), set()

        def compute():
            x = torch.randn(4, 8, device="cuda")
            for _ in range(200):
                devices.add((x @ weight).relu().device.type)
            has_ended.set()

        threading.Thread(target=compute).start()
        while not has_ended.is_set():
            assert (weight + 1).relu().is_cuda
        assert devices <= {"cpu", "cuda"}
        train(batches_by_no_thread(lambda: torch.randn(4, 8).cuda()))

    foresee(program, 1)


def reads_a_value():
    return torch.ones(4, 8, device="cuda") * torch.ones(1, device="cuda").item()


def fails_in_torch():
    return torch.ones(4, 8, device="cuda") @ torch.ones(4, 8, device="cuda")


@pytest.mark.parametrize("make", [reads_a_value, fails_in_torch])
def test_an_error_of_a_thread_ends_the_recording(make):
    """The rank waits for the thread's next batch for ever."""
    with pytest.raises(UnsupportedOp, match=r"test_threads.py:\d+.*thread"):
        foresee(lambda: train(batches_by_a_queue(make)), 1)


def test_an_optimizer_of_a_thread_is_refused():
    def program():
        model = nn.Linear(8, 8).cuda()
        thread = threading.Thread(target=lambda: torch.optim.SGD(model.parameters(), lr=0.1).step(), name="trainer")
        thread.start()
        thread.join()

    with pytest.raises(UnsupportedOp, match=r"^an optimizer steps in thread 'trainer' at .*test_threads.py:\d+"):
        foresee(program, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_waits_for_a_thread_that_has_ended_is_told(monkeypatch):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.3)

    def program():
        batches = queue.Queue()
        threading.Thread(target=lambda: [].pop()).start()
        batches.get()

    with pytest.raises(DeadlockError, match=r"rank 0 waits for another thread at .*test_threads.py:\d+: batches.get"):
        foresee(program, 1)
