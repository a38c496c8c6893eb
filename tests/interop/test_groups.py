"""Groups, messages, Work and failures, as torch's users see them."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from echelon import simulate
from echelon.errors import CollectiveMismatch, LaunchError, PeerFailed, Timeout, UnsupportedOp
from echelon.interop.process_group import EchelonProcessGroup, group_for
from tests.helpers.torch_groups import begin, launched

N = 2


def messages(rank):
    other, got = 1 - rank, torch.zeros(2, 3)
    if rank == 0:
        dist.send(torch.arange(6.0), other, tag=7)  # as many elements, of another shape
        dist.send(torch.ones(2, 3), other)
    else:
        early = torch.zeros(2, 3)
        assert dist.recv(early, src=0) == 0
        assert dist.recv(got, tag=7) == 0  # from any rank
        assert early.sum() == 6
    across = torch.zeros(3, 2).t()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, across, other), dist.P2POp(dist.isend, torch.full((2, 3), rank + 1.0), other)]
    )
    for work in works:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    future = dist.irecv(torch.zeros(1), other).get_future()
    dist.isend(torch.full((1,), rank + 1.0), other).wait()
    return got.flatten().tolist(), across.flatten().tolist(), future.wait()[0].item()


def test_messages(in_world):
    first, second = in_world(N, messages)
    assert first == ([0.0] * 6, [2.0] * 6, 2.0)
    assert second == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 6, 1.0)


def behind_others(end):
    """Returns the values of tensors whose collectives nobody has waited for, when `end` has returned."""
    reduced, gathered = [torch.ones(300_000) for _ in range(10)], [torch.zeros(N, 300) for _ in range(10)]
    for tensor, out in zip(reduced, gathered, strict=True):
        dist.all_gather(list(out.unbind()), torch.full((300,), 3.0), async_op=True)
        dist.all_reduce(tensor, async_op=True)
    end()
    return {value for each in reduced for value in each.tolist()}, {
        value for each in gathered for value in each[0].tolist()
    }


def through(group, path, transport, end):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHELON_BACKEND", transport)
        begin(group, path)
    found = behind_others(getattr(dist, end))
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("end", ["barrier", "destroy_process_group"])
def test_a_barrier_and_the_end_of_a_group_come_after_operations_before_them(pool, tmp_path, transport, end):
    """Gloo finishes these first. A program may rely on that, and would get other numbers without an error."""
    assert pool.run(through, N, str(tmp_path / "store"), transport, end) == [({2.0}, {3.0})] * N


@pytest.mark.parametrize("end", ["barrier", "destroy_process_group"])
def test_on_simulated_ranks_they_do_so_too(end):
    def rank(_group):
        dist.init_process_group("gloo")
        return behind_others(getattr(dist, end))

    assert simulate(rank, N).results == [({2.0}, {3.0})] * N


def end_in_a_handler(group, path, handles):
    """Returns a tensor and what a callback of its future made, after a group's end where an exception is handled."""
    begin(group, path)
    tensor, doubled = torch.ones(300_000), torch.zeros(300_000)
    dist.all_reduce(tensor, async_op=True).get_future().then(lambda found: doubled.copy_(2 * found.value()[0]))
    if handles:
        try:
            next(iter(()))
        except StopIteration:  # the end of the data, say
            dist.destroy_process_group()
    else:
        dist.destroy_process_group()
    return tensor.unique().tolist(), doubled.unique().tolist()


@pytest.mark.parametrize("handles", [False, True])
def test_the_end_of_a_group_comes_after_callbacks_wherever_it_is_called(pool, tmp_path, handles):
    assert pool.run(end_in_a_handler, N, str(tmp_path / "store"), handles) == [([2.0], [4.0])] * N


def unseen_failure(group, path):
    begin(group, path)
    dist.all_reduce(torch.ones(1 + group.rank), async_op=True)
    with pytest.raises(CollectiveMismatch, match=r"float32\[1\]"):
        dist.destroy_process_group()


def test_the_end_of_a_group_raises_an_error_that_nobody_has_seen(pool, tmp_path):
    pool.run(unseen_failure, N, str(tmp_path / "store"))


def abandoned(group, path, ended):
    """Rank 0 stays, and never joins the operation of rank 1."""
    begin(group, path)
    if group.rank == 1:
        dist.all_reduce(torch.ones(1), async_op=True)
        try:
            raise ValueError("the program's own")
        except ValueError:
            dist.destroy_process_group()
        ended.touch()
        return
    while not ended.exists():
        time.sleep(0.01)
    with pytest.raises(PeerFailed):
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


def test_a_group_that_an_exception_ends_does_not_wait_for_ever(pool, tmp_path):
    pool.run(abandoned, N, str(tmp_path / "store"), tmp_path / "ended", timeout=15.0)


def begins_again(group):
    import echelon.interop.torch_distributed  # noqa: F401 # registers the backend

    sums = []
    with launched(group):
        for _ in range(5):
            dist.init_process_group("echelon", timeout=timedelta(seconds=10))
            dist.all_reduce(ones := torch.ones(1))
            dist.destroy_process_group()
            sums.append(ones.item())
    return sums


def test_a_world_begins_again_at_the_same_port(pool):
    """Ranks found the old server of torch's store there, which rank 0 was about to end, and waited for its keys."""
    assert pool.run(begins_again, 4, timeout=60.0) == [[4.0] * 5] * 4


def call_twice():
    for _ in range(2):  # the first may still find rank 0
        dist.all_reduce(torch.ones(1))


def aborted(group, path):
    begin(group, path)
    if group.rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
        dist.group.WORLD.abort()
    else:
        with pytest.raises(PeerFailed, match=r"rank 0 .*it has aborted"):
            call_twice()
    dist.destroy_process_group()


def test_the_end_of_a_group_that_its_rank_has_aborted_raises_nothing(pool, tmp_path):
    pool.run(aborted, N, str(tmp_path / "store"))


def groups(rank):
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 1], [2])]
    results = []
    for group in pairs:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            tensor = torch.full((2,), rank + 1.0)
            dist.all_reduce(tensor, group=group)
            results.append(tensor.tolist())
    if rank > 0:
        local = dist.new_group([1, 2], use_local_synchronization=True)
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, 2, group=local)
        results.append(tensor.tolist())
        dist.destroy_process_group(local)
    dist.barrier()
    return results


def test_groups_have_contexts_of_their_own(in_world):
    assert in_world(3, groups) == [[[3.0] * 2], [[3.0] * 2, [5.0] * 2, [2.0]], [[5.0] * 2, [3.0] * 2, [2.0]]]


def groups_in_another_order(rank):
    pairs = [[0, 1], [1, 2]] if rank == 0 else [[1, 2], [0, 1]]
    made = {tuple(pair): dist.new_group(pair) for pair in pairs}
    try:
        for pair in ((0, 1), (1, 2)):
            if rank in pair:
                dist.all_reduce(torch.ones(2), group=made[pair])
    except (CollectiveMismatch, PeerFailed) as error:
        return str(error)
    return ""


def test_groups_of_one_name_that_were_made_in_another_order_are_told_apart(in_world):
    told = in_world(3, groups_in_another_order)
    assert any("different ones of the same name: make groups in the same order on every rank" in each for each in told)


def beside_gloo(rank):
    group = dist.new_group(backend="echelon")
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)
    return tensor.tolist(), dist.get_backend(group)


def test_a_group_of_a_world_over_gloo(in_world):
    assert in_world(N, beside_gloo, backend="gloo") == [([4.0] * 2, "echelon")] * N


def unknown_to_torch(rank):
    world = dist.group.WORLD
    twin = EchelonProcessGroup(world.group, world.get_group_store())
    return world._device_types, twin._device_types


def test_a_group_that_torch_is_still_making_has_no_devices(in_world):
    """torch 2.15 asks while it makes the group, for its flight recorder, and has no backends noted for it yet."""
    assert in_world(1, unknown_to_torch) == [([torch.device("cpu")], [])]


class Spy(dist.ProcessGroup):
    """Stands for NCCL: carries tensors on the meta device, and says what it was called for."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.calls = []

    def setGroupName(self, name):
        self.name = name

    def getGroupName(self):
        return self.name

    def allreduce(self, tensors, opts):
        self.calls.append(("allreduce", tensors[0].device.type, self.size()))

    def shutdown(self):
        self.calls.append("shutdown")


def other_devices(rank):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    with pytest.raises(UnsupportedOp, match="on the meta device, which has no values: pass one on the CPU"):
        dist.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(UnsupportedOp, match=r"name a backend for the others, as in .*,cuda:nccl"):
        group_for(dist.group.WORLD, torch.device("cuda"))
    assert dist.group.WORLD._device_types == [torch.device("cpu")]
    return tensor.tolist()


def test_a_tensor_of_another_device_is_refused(in_world):
    assert in_world(N, other_devices) == [[2.0, 2.0]] * N


def both_devices(rank):
    world = dist.group.WORLD
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.all_reduce(torch.ones(2, device="meta"))
    dist.all_reduce(torch.ones(2, device="meta"))
    spy = group_for(world, torch.device("meta"))
    return tensor.tolist(), spy.calls, [str(device) for device in world._device_types]


def make_spy(_store, rank, size, _timeout):
    return Spy(rank, size)


def with_spy(group, path):
    dist.Backend.register_backend("spy", make_spy, devices=["meta"])
    begin(group, path, "cpu:echelon,meta:spy")
    try:
        return both_devices(group.rank)
    finally:
        dist.destroy_process_group()


def test_a_backend_for_each_kind_of_device(pool, tmp_path):
    expected = [2.0, 2.0], [("allreduce", "meta", N)] * 2, ["cpu", "meta"]
    for tensor, calls, devices in pool.run(with_spy, N, str(tmp_path / "store")):
        assert (tensor, calls[:2], devices) == expected


def futures(rank):
    """Callbacks begin operations, wait for them, and have values; nothing waits for itself."""
    tensor = torch.ones(2)
    work, later = dist.all_reduce(tensor, async_op=True), dist.all_reduce(torch.ones(1), async_op=True)

    def again(future):
        (total,) = future.value()
        dist.all_reduce(total)  # blocking, behind whatever is queued
        return dist.all_reduce(total, async_op=True).get_future().then(lambda future: future.value()[0] + 1).wait()

    behind = work.get_future().then(again)  # at once, if the work is done already
    later.wait()
    return behind.wait().tolist(), work.result()[0] is tensor, work.exception()


def test_futures_of_collectives(in_world):
    assert in_world(N, futures) == [([9.0, 9.0], True, None)] * N


def futures_after_waits(rank):
    """C++ reads the value of the future as soon as a wait for the Work has returned."""
    works = (dist.all_reduce(torch.ones(1), async_op=True) for _ in range(200))
    return all(work.wait() and work.get_future().done() for work in works)


def test_a_work_that_was_waited_for_has_a_finished_future(in_world):
    assert in_world(2, futures_after_waits) == [True, True]


def times_out(rank):
    late, next_one = torch.zeros(1), torch.zeros(1)
    if rank == 0:
        with pytest.raises(Timeout, match="receive from rank 1"):
            dist.irecv(late, 1).wait(timedelta(milliseconds=100))
    dist.barrier()
    if rank == 0:
        dist.recv(next_one, 1)
    else:
        dist.send(torch.ones(1), 0)
    return late.item(), next_one.item()


def test_a_wait_with_a_timeout_withdraws_the_receive(in_world):
    """Else the tensor would be written when nobody expects it, and the next receive would wait for ever."""
    assert in_world(N, times_out) == [(0.0, 1.0), (0.0, 0.0)]


def train(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        inputs = torch.randn(8, 6, generator=generator)
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_ddp_of_torch_trains_as_over_gloo(in_world):
    ours, theirs = in_world(N, train), in_world(N, train, backend="gloo")
    assert torch.equal(ours[0], ours[1])
    torch.testing.assert_close(ours[0], theirs[0])


def uneven(rank, divide_by_initial_world_size):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for _ in range(2 + rank):
            model.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
    return model.module.weight.grad.flatten().tolist()


@pytest.mark.parametrize(("divides", "last"), [(True, 1.0), (False, 2.0)])
def test_ddp_of_torch_joins_uneven_inputs(in_world, divides, last):
    assert in_world(N, uneven, divides)[1] == [last] * 3


def compress(rank, compresses):
    """Returns a gradient of rank 1, which PowerSGD compresses without a loss; its hook waits in callbacks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    if compresses:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model.zero_grad()
        model(torch.full((2, 32), rank + 1.0)).sum().backward()
    return model.module.weight.grad


def test_a_hook_of_torchs_ddp_waits_in_callbacks(in_world):
    for gradient, expected in zip(in_world(N, compress, True), in_world(N, compress, False), strict=True):
        torch.testing.assert_close(gradient, expected)


def fail_in_hook(rank):
    def hook(state, bucket):
        def scale(future):
            raise ArithmeticError("no scale")

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(scale)

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, hook)
    with pytest.raises(ArithmeticError, match="no scale"):  # not that torch cannot cast its future's value
        model(torch.ones(2, 4)).sum().backward()


def test_a_hook_that_fails_raises_its_own_error_in_backward(in_world):
    in_world(N, fail_in_hook)


def tensor_hook(gradient):
    dist.all_reduce(torch.ones(3))


def hooked_and_alone(kind):
    def hook(state, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    if kind == "comm hook":
        model.register_comm_hook(None, hook)
    if kind == "tensor hook":
        next(model.module.parameters()).register_hook(tensor_hook)
    if dist.get_rank():
        dist.barrier()
    else:
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("comm hook", "DDP's backward (all_reduce(sum) of float32[20], #"),
        ("tensor hook", " on rank 1, but all_reduce(sum) of float32[3], #"),
    ],
)
def test_a_comm_hook_is_a_part_of_ddps_backward_and_a_hook_of_a_tensor_is_not(kind, told):
    with pytest.raises(CollectiveMismatch) as caught:
        simulate(hooked_and_alone, 2, (kind,))
    assert told in str(caught.value)


def train_until_killed(rank, path):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(1000):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:  # torch's C++ keeps only the text of an error that comes by a future
            with pytest.raises(PeerFailed, match="rank 1 failed"):
                dist.all_reduce(torch.ones(1))
            with open(path, "w") as file:
                file.write(str(error))
            raise


def test_a_rank_that_is_killed_is_named(in_world, tmp_path):
    with pytest.raises(PeerFailed, match="rank 1"):
        in_world(N, train_until_killed, str(tmp_path / "told"))
    told = (tmp_path / "told").read_text()
    assert "PeerFailed: rank 1 failed" in told
    assert "in DDP's backward of group 'world'" in told


def with_another_engine(group, path):
    os.environ["ECHELON_BACKEND"] = "gloo"
    try:
        begin(group, path)
    finally:
        del os.environ["ECHELON_BACKEND"]
        begin(group, path + " again")  # and its end: torch has counted the one that failed, and names the next by that
        dist.destroy_process_group()


def test_an_engine_of_torch_below_itself_is_refused(pool, tmp_path):
    with pytest.raises(LaunchError, match="ECHELON_BACKEND=gloo under torch"):
        pool.run(with_another_engine, 1, str(tmp_path / "store"))


def backend_below(group):
    """Called with the environment that a launched rank has."""
    import echelon.interop.torch_distributed  # noqa: F401 # registers the backend

    dist.init_process_group("cpu:echelon")
    try:
        below = dist.group.WORLD.group
        return type(below.backend).__name__, below.world_size
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "name"), [("shm", "SharedMemoryBackend"), ("tcp", "TcpBackend")])
def test_the_backend_of_a_spawned_rank_is_the_one_below_torch(pool, backend, name):
    assert pool.run(backend_below, 2, backend=backend) == [(name, 2)] * 2
