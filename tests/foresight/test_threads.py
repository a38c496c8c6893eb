"""Threads that a recorded program starts: they make and move tensors, and an error of theirs ends the recording."""

import concurrent.futures.thread
import operator
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from echelon import DeadlockError, UnsupportedOp, foresee
from echelon.foresight.trace import Copy, Kernel
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


def uses(tensor, weight):
    """Returns tensors on the GPU, which a thread makes from one there."""
    with torch.no_grad():
        tensor = tensor.float().sub_(0.5).div_(torch.ones(8))
        return torch.cat([*tensor.chunk(2), tensor @ weight, torch.zeros_like(tensor), tensor.to(weight)])[:4]


def test_a_thread_computes_shapes_of_tensors_on_the_gpu():
    def program():
        weight = nn.Parameter(torch.randn(8, 8, device="cuda"))
        seen = []

        def look():
            found = uses(torch.randn(4, 8, dtype=torch.float16).cuda(), weight)
            seen.append(
                (found.shape, found.dtype, found.is_cuda, found.device, found.get_device(), found.requires_grad)
            )
            seen.append((weight.grad, weight.requires_grad, weight.detach().requires_grad, weight.cpu().shape))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert seen[0] == ((4, 8), torch.float32, True, torch.device("cuda", 0), 0, False)
        assert seen[1] == (None, True, False, (8, 8))
        train(batches_by_no_thread(lambda: torch.randn(4, 8).cuda()))

    foresee(program, 1)


def test_the_rank_copies_a_tensor_of_the_host_that_a_thread_has_made():
    def program(batches):
        train(each.cuda() for each in batches(lambda: torch.randn(4, 8)))

    copies = [
        [each._replace(place=0) for each in foresee(program, 1, (batches,)).traces[0].entries if isinstance(each, Copy)]
        for batches in (batches_by_a_pool, batches_by_no_thread)
    ]
    assert [each.num_bytes for each in copies[0]] == [each.num_bytes for each in copies[1]] == [4 * 8 * 4]


def reads_a_value():
    return torch.ones(4, 8, device="cuda") * torch.ones(1, device="cuda").item()


def selects_by_values():
    x = torch.ones(4, 8, device="cuda")
    return x[x > 0]


def fails_in_torch():
    return torch.ones(4, 8, device="cuda") @ torch.ones(4, 8, device="cuda")


@pytest.mark.parametrize("make", [reads_a_value, selects_by_values, fails_in_torch])
def test_an_error_of_a_thread_ends_the_recording(make):
    """The rank waits for the thread's next batch for ever."""
    with pytest.raises(UnsupportedOp, match=r"^thread 'Thread.*test_threads.py:\d+"):
        foresee(lambda: train(batches_by_a_queue(make)), 1)


def test_a_refusal_in_a_pool_ends_the_recording():
    """The pool keeps the error for a result that the program never asks for."""

    def program():
        batches = queue.Queue()
        ThreadPoolExecutor(1).submit(lambda: batches.put(reads_a_value()))
        train(iter(batches.get, None))

    with pytest.raises(UnsupportedOp, match=r"^thread 'ThreadPool.* reads values \(item\).*test_threads.py:\d+"):
        foresee(program, 1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1).step(), "steps an optimizer"),
        (lambda model, _: model(torch.ones(4, 8).cuda()), "records a gradient"),
        (lambda _, loss: loss.backward(), "computes a backward"),
        (lambda model, loss: torch.autograd.grad(loss, model.weight), "computes a backward"),
    ],
)
def test_training_in_a_thread_is_refused(act, message):
    def program():
        model = nn.Linear(8, 8).cuda()
        loss = model(torch.ones(4, 8).cuda()).sum()
        thread = threading.Thread(target=lambda: act(model, loss), name="trainer")
        thread.start()
        thread.join()
        train(batches_by_no_thread(lambda: torch.randn(4, 8).cuda()))

    with pytest.raises(UnsupportedOp, match=rf"^thread 'trainer' {message}.* at .*test_threads.py:\d+"):
        foresee(program, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_waits_for_a_thread_that_has_ended_is_told(monkeypatch):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.3)
    # The test runner has threads of its own that wait for pipes.
    monkeypatch.setattr(watchdog.Watchdog, "_waits_outside", lambda *_: False)

    def program():
        batches = queue.Queue()
        threading.Thread(target=lambda: [].pop(), name="loader").start()
        batches.get()

    with pytest.raises(
        DeadlockError, match=r"rank 0 waits for another thread at .*test_threads.py:\d+: batches.get"
    ) as e:
        foresee(program, 1)
    assert "thread 'loader' has failed" in str(e.value)
    assert "IndexError: pop from empty list" in str(e.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fails", [lambda: queue.Queue().get(timeout=0.01), lambda: os.listdir("/nowhere")])
def test_a_thread_may_end_by_an_error_of_its_own(fails):
    def program():
        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()
        train(batches_by_no_thread(lambda: torch.randn(4, 8).cuda()))

    assert not foresee(program, 1).assumptions


# Threads that the program leaves behind


@pytest.fixture
def a_wait_for_a_child():
    """A thread beside the program waits for a child process. So it may be that the program waits for it as well."""
    words = [sys.executable, "-c", "import time; [print(i, flush=True) or time.sleep(0.2) for i in range(300)]"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        reading = threading.Thread(target=child.stdout.readlines)
        reading.start()
        yield
        child.kill()
        reading.join()


def test_a_program_that_is_ended_waits_for_no_thread_with_a_full_queue(monkeypatch, a_wait_for_a_child):
    """A pool waits at its end for a thread, which waits for a place in the queue."""
    monkeypatch.setattr(watchdog, "PATIENCE", 0.3)

    def program():
        batches = queue.Queue(1)

        def fill():
            for _ in range(10):
                batches.put(torch.randn(4, 8).cuda())

        with ThreadPoolExecutor(1) as pool:
            pool.submit(fill)
            train(batches.get() for _ in range(10))

    assert foresee(program, 1).step_seconds > 0


def leave_behind(seen):
    """Starts threads that never end by themselves."""
    full, has_ended = queue.Queue(1), threading.Event()

    def fill():
        while True:
            full.put(torch.randn(4, 8).cuda())

    def compute():
        while True:
            torch.ones(1)

    def sleep():
        while True:
            time.sleep(0.01)

    def beat():
        seen.append(len(seen))
        threading.Timer(0.01, beat).start()

    threading.Timer(60, beat).start()
    for each in (fill, compute, sleep, beat, has_ended.wait, queue.Queue().get):
        threading.Thread(target=lambda each=each: each(), name="left").start()


def test_threads_leave_with_their_rank(capfd):
    """They would go on in the process, and write real files."""
    seen = []

    def program(start):
        start()
        train(batches_by_no_thread(lambda: torch.randn(4, 8).cuda()))

    before = foresee(program, 1, (lambda: None,))
    others = threading.enumerate()
    foresee(program, 1, (lambda: leave_behind(seen),))
    assert set(threading.enumerate()) <= set(others)
    num_beats = len(seen)
    after = foresee(program, 1, (lambda: None,))
    assert after.traces == before.traces
    assert len(seen) == num_beats > 0
    assert capfd.readouterr().err == ""


def test_a_thread_of_a_pool_that_waits_for_ever_does_not_hold_the_end_of_python():
    lock = threading.Lock()
    lock.acquire()

    def program():
        ThreadPoolExecutor(1, "holding").submit(lambda: lock.acquire())
        train(batches_by_no_thread(lambda: torch.randn(4, 8).cuda()))

    foresee(program, 1)
    names = [each.name for each in concurrent.futures.thread._threads_queues]
    assert not any(each.startswith("holding") for each in names)
    lock.release()


def test_threads_of_libraries_stay():
    """A library's thread, as of a progress bar, is the same for later programs."""
    waiting = queue.Queue()
    thread = threading.Thread(target=operator.methodcaller("get"), args=(waiting,))

    def program():
        thread.start()
        train(batches_by_no_thread(lambda: torch.randn(4, 8).cuda()))

    foresee(program, 1)
    foresee(lambda: train(batches_by_no_thread(lambda: torch.randn(4, 8).cuda())), 1)  # takes a moment
    assert thread.is_alive()
    waiting.put(None)
    thread.join(20)
    assert not thread.is_alive()
