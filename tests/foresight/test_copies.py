"""Copies between host and GPU of ordinary programs, with their bytes and seconds by hand."""

import re
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.data import DataLoader, TensorDataset, default_collate

from echelon import foresee
from echelon.foresight.play.devices import DEVICES
from echelon.foresight.record.run import record
from echelon.foresight.trace import Copy, HostKernel, HostWait, Kernel
from tests.foresight import programs

WIDTH, DEPTH, RANKS, STEPS = 1024, 4, 8, 3
SHARD = WIDTH * WIDTH * 4 // RANKS
"""Bytes in float32 of a rank's part of a layer."""
MIB = 1 << 20
GPU = DEVICES["h100"]


def stack():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def step(model, optimizer, device, after=lambda: None, saved=nullcontext):
    with saved():
        out = model(torch.randn(WIDTH, WIDTH, device=device))
    out.sum().backward()
    after()
    optimizer.step()
    optimizer.zero_grad()


def copies(trace, to_gpu=None, phase=None):
    """Returns the bytes of copies in a direction and a phase."""
    return [
        entry.num_bytes
        for entry in trace.entries
        if isinstance(entry, Copy) and to_gpu in (None, entry.to_gpu) and phase in (None, entry.phase)
    ]


def work(trace):
    """Returns copies, and operators that change types or layouts, in order, with their place and bytes."""
    names = {Copy: lambda each: "to the GPU" if each.to_gpu else "to the host", HostKernel: lambda _: "host"}
    return [
        (names.get(type(each), lambda _: "GPU")(each), each.num_bytes)
        for each in trace.entries
        if isinstance(each, Copy) or (isinstance(each, HostKernel | Kernel) and each.name in ("_to_copy", "copy_"))
    ]


@pytest.mark.parametrize(("non_blocking", "is_halved_on"), [(True, "GPU"), (False, "host")])
def test_a_type_changes_on_the_host_unless_the_host_goes_on(non_blocking, is_halved_on):
    """As in PyTorch, which so copies the bytes of float32 if the host does not wait."""

    def program(way):
        if way == "to":
            on_host().to("cuda", torch.bfloat16, non_blocking=non_blocking)
        else:
            torch.empty(100, device="cuda", dtype=torch.bfloat16).copy_(on_host(), non_blocking=non_blocking)

    def on_host():
        return torch.empty(100, pin_memory=True)

    both = [(is_halved_on, 600), ("to the GPU", 400 if non_blocking else 200)]
    for way in ("to", "copy_"):
        assert work(record(program, 1, args=(way,))[0]) == (both[::-1] if non_blocking else both)


def test_a_type_of_a_tensor_that_leaves_the_gpu_changes_on_the_host_if_it_waits():
    def program(non_blocking):
        torch.empty(100, device="cuda", dtype=torch.bfloat16).to("cpu", torch.float32, non_blocking=non_blocking)

    assert work(record(program, 1, args=(False,))[0]) == [("to the host", 200), ("host", 600)]
    assert work(record(program, 1, args=(True,))[0]) == [("GPU", 600), ("to the host", 400)]


def test_images_get_their_layout_on_the_gpu():
    def program():
        images = torch.empty(2, 3, 4, 4).to("cuda", memory_format=torch.channels_last)
        assert images.is_contiguous(memory_format=torch.channels_last)

    assert work(record(program, 1)[0]) == [("to the GPU", 384), ("GPU", 768)]


def test_a_table_on_the_host_sends_the_sums_of_its_bags():
    def program():
        table, model = nn.EmbeddingBag(100, 64, mode="sum").cpu(), nn.Linear(64, 8).cuda()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (table, model)]
        for _ in range(2):
            model(table(torch.randint(100, (32, 5))).to("cuda")).sum().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()

    trace = record(program, 1)[0]
    assert copies(trace, to_gpu=True) == copies(trace, to_gpu=False) == [32 * 64 * 4]
    on_host = {each.name for each in trace.entries if isinstance(each, HostKernel)}
    assert {"_embedding_bag", "_embedding_bag_backward"} <= on_host


def test_offsets_of_bags_are_where_the_table_is():
    def bags(offsets):
        table = nn.EmbeddingBag(100, 64, mode="sum").cuda()
        table(torch.randint(100, (32,)).cuda(), offsets).sum().backward()

    with pytest.raises(RuntimeError, match="_embedding_bag takes a tensor of the CPU, made at"):
        record(lambda: bags(torch.tensor([0, 10])), 1)
    record(lambda: bags(torch.tensor([0, 10]).cuda()), 1)


def test_bags_of_indices_of_an_unknown_device():
    def program():
        indices = default_collate([3, 4, 5, 6])
        nn.EmbeddingBag(100, 64, mode="sum")(indices, torch.tensor([0, 2])).sum().backward()

    record(program, 1)


def waits_after_copies(trace):
    pairs = zip(trace.entries, trace.entries[1:], strict=False)
    return sum(isinstance(one, Copy) and two == HostWait(one.stream, -1, one.place) for one, two in pairs)


def computed(trace):
    return [entry for entry in trace.entries if isinstance(entry, HostKernel)]


def live(trace):
    """Returns the bytes at the begin of the step, by kind and by whether they are on the host."""
    sizes = Counter()
    for entry in trace.live:
        sizes[entry.kind, entry.on_host] += entry.num_bytes
    return sizes


# FSDP2


def fsdp2(policy, backend, clips):
    dist.init_process_group(backend)
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = stack()
    options = {"mesh": mesh, "offload_policy": policy, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for each in (*model, model):
        fully_shard(each, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    clip = (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)) if clips else lambda: None
    for _ in range(STEPS):
        step(model, optimizer, "cuda", clip)


@pytest.fixture(scope="module")
def plain():
    return foresee(fsdp2, RANKS, (OffloadPolicy(), "nccl", False))


@pytest.fixture(scope="module")
def offloaded():
    return foresee(fsdp2, RANKS, (CPUOffloadPolicy(), "nccl", False))


def test_offloaded_state_of_fsdp2_leaves_the_gpu(plain, offloaded):
    state = DEPTH * SHARD
    before, after = live(plain.traces[0]), live(offloaded.traces[0])
    kinds = {"parameters": state, "gradients": state, "optimizer": 2 * state}
    assert all(before[kind, False] == size for kind, size in kinds.items())
    assert all((after[kind, True], after[kind, False]) == (size, 0) for kind, size in kinds.items())
    assert before["other", False] == after["other", False], "the input"
    memory, least = plain.memory[0], offloaded.memory[0]
    assert {"parameters", "optimizer", "gradients"}.isdisjoint(least.kinds_at_peak)
    # At the peak, in the last layer's backward, no gradient is there yet, and FSDP2 has the same buffers.
    assert memory.live_peak - least.live_peak == 3 * state + memory.kinds_at_peak.get("gradients", 0)
    # Parameters, gradients and two moments. On the CPU the optimizer takes one parameter after another: a square root
    # of a moment, its quotient, and the quotient of the parameter before.
    assert least.host_peak == 4 * state + 3 * SHARD
    assert offloaded.host_memory == (RANKS * least.host_peak,)
    assert plain.host_memory == (0,)


def test_fsdp2_copies_shards_to_the_gpu_twice_and_gradients_back(offloaded):
    trace = offloaded.traces[0]
    assert copies(trace, True, "forward") == copies(trace, True, "backward") == [SHARD] * DEPTH
    assert copies(trace, False) == copies(trace, False, "backward") == [SHARD] * DEPTH
    assert waits_after_copies(trace) == 0, "pinned"
    role = offloaded.played.roles[0]
    seconds = GPU.kernel_seconds + SHARD / (GPU.host_link * GPU.host_link_share)
    assert all(span.end - span.start == pytest.approx(seconds) for span in role.copies)


def test_the_optimizer_of_offloaded_parameters_runs_on_the_host(plain, offloaded):
    trace = offloaded.traces[0]
    on_gpu = [each.name for each in trace.entries if isinstance(each, Kernel) and each.phase == "optimizer"]
    assert on_gpu == []
    work = computed(trace)
    assert {each.phase for each in work} == {"optimizer"}
    # mul_ by the decay, lerp_, mul_, addcmul_, sqrt, div_, add_ and addcdiv_, each with the tensors that it takes.
    assert sum(each.num_bytes for each in work) == (2 + 3 + 2 + 3 + 2 + 2 + 2 + 4) * DEPTH * SHARD
    # Nothing hides it: the optimizer waits for all gradients.
    seconds = offloaded.played.roles[0].shares.host * offloaded.step_seconds
    assert seconds == pytest.approx(sum(map(GPU.host_seconds, work)), rel=0.01)
    assert offloaded.played.roles[0].kernel_seconds["other"] < plain.played.roles[0].kernel_seconds["other"]


def test_the_report_says_what_is_assumed_and_the_memory_of_the_host(offloaded):
    copying, computing = offloaded.assumptions
    assert copying.startswith("copies between the CPU and a GPU move 55 GB/s in each direction")
    assert computing.startswith("operators on tensors of the CPU move 61 GB/s on each rank")
    text = str(offloaded)
    assert re.search(r"tensors on the CPU, of all ranks of a host +76\.00\n", text)
    assert re.search(r"computing on the CPU +\d+\.\d%\n", text)
    assert offloaded.report().to_json()["memory"]["hosts"] == [76 * MIB]
    assert "25 GB/s" in offloaded.on(gpu="a100").assumptions[0]
    assert offloaded.on(gpu="a100").step_seconds > offloaded.step_seconds


def test_without_pinned_memory_the_host_waits_for_copies_of_fsdp2():
    trace = foresee(fsdp2, 2, (CPUOffloadPolicy(pin_memory=False), "nccl", False)).traces[0]
    assert waits_after_copies(trace) == len(copies(trace)) == 3 * DEPTH


def test_clipping_of_offloaded_gradients_needs_a_backend_for_the_cpu():
    line = r"test_copies\.py:\d+"
    text = rf"nccl at .*{line} takes no tensor of the CPU, .* offloaded at .*{line}: begin with .*'cpu:gloo,cuda:nccl'"
    with pytest.raises(RuntimeError, match=text):
        foresee(fsdp2, 2, (CPUOffloadPolicy(), "nccl", True))
    seen = foresee(fsdp2, 2, (CPUOffloadPolicy(), "cpu:gloo,cuda:nccl", True))
    assert "communication of tensors of the CPU takes the time of 'nccl' at " in seen.assumptions[0]
    assert {each.phase for each in computed(seen.traces[0])} == {"optimizer", "other"}


def on_meta(_):
    programs.begin()
    with torch.device("meta"):
        model = stack()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(STEPS):
        step(model, optimizer, "cuda")


def test_offloaded_parameters_from_the_meta_device_are_on_the_host():
    trace = foresee(on_meta, 2, (None,)).traces[0]
    size = DEPTH * WIDTH * WIDTH * 4 // 2
    assert (live(trace)["parameters", True], live(trace)["parameters", False]) == (size, 0)
    assert waits_after_copies(trace) == 0, "FSDP2 pins them before its first step"


# FSDP1


def fsdp1(offloads, use_orig_params, in_16_bits):
    device = programs.begin()
    model = stack()
    options = {
        "device_id": device,
        "cpu_offload": CPUOffload(offloads),
        "use_orig_params": use_orig_params,
        "mixed_precision": MixedPrecision(torch.bfloat16) if in_16_bits else None,
    }
    for number, layer in enumerate(model):
        model[number] = FullyShardedDataParallel(layer, **options)
    model = FullyShardedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        step(model, optimizer, device, lambda: model.clip_grad_norm_(1.0))


@pytest.mark.parametrize(("use_orig_params", "in_16_bits"), [(True, False), (False, False), (True, True)])
def test_offloaded_state_of_fsdp1_is_on_the_host(use_orig_params, in_16_bits):
    trace = foresee(fsdp1, 2, (True, use_orig_params, in_16_bits)).traces[0]
    state = DEPTH * WIDTH * WIDTH * 4 // 2
    sizes = live(trace)
    kinds = {"parameters": state, "gradients": state, "optimizer": 2 * state}
    assert all((sizes[kind, True], sizes[kind, False]) == (size, 0) for kind, size in kinds.items())
    assert copies(trace, True, "forward") == copies(trace, True, "backward") == [state // DEPTH] * DEPTH
    assert copies(trace, False, "backward") == [state // DEPTH] * DEPTH
    assert all(each.name != "add_" for each in trace.entries if isinstance(each, Kernel)), "nothing is accumulated"


def test_fsdp1_without_offloading_copies_nothing():
    seen = foresee(fsdp1, 2, (False, True, False))
    assert (copies(seen.traces[0]), computed(seen.traces[0]), seen.host_memory) == ([], [], (0,))
    assert seen.assumptions == ()


# Saved tensors


def saves(context):
    device = programs.begin()
    model = nn.Sequential(*(nn.GELU() for _ in range(DEPTH)), nn.Linear(WIDTH, WIDTH).to(device))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(STEPS):
        x = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)
        with context():
            out = model(x)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def own_hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.cpu(), lambda x: x.cuda(non_blocking=True))


def hooks_that_go_on():
    """torch pins the memory to which it copies without waiting."""
    hooks = lambda x: x.to("cpu", non_blocking=True), lambda x: x.cuda(non_blocking=True)
    return torch.autograd.graph.saved_tensors_hooks(*hooks)


@pytest.mark.parametrize(
    ("context", "waits"),
    [
        (lambda: torch.autograd.graph.save_on_cpu(pin_memory=True), 0),
        (torch.autograd.graph.save_on_cpu, 2 * (DEPTH + 2)),
        (own_hooks, 2 * (DEPTH + 2)),
        (hooks_that_go_on, 0),
    ],
)
def test_saved_tensors_leave_the_gpu_in_forward_and_come_back_in_backward(context, waits):
    plain, seen = foresee(saves, 1, (nullcontext,)), foresee(saves, 1, (context,))
    trace, size = seen.traces[0], 4 * WIDTH * WIDTH
    # Inputs of all layers, and the weight of the last one.
    assert copies(trace, False) == copies(trace, False, "forward") == [size] * (DEPTH + 2)
    assert copies(trace, True) == copies(trace, True, "backward") == [size] * (DEPTH + 2)
    assert waits_after_copies(trace) == waits
    assert seen.memory[0].host_peak == (DEPTH + 2) * size
    # Without inputs that wait for their backward pass.
    assert plain.memory[0].live_peak - seen.memory[0].live_peak >= (DEPTH - 2) * size
    assert seen.step_seconds > plain.step_seconds


# Copies of the program itself


def prefetches(has_own_stream, pins, non_blocking):
    device = programs.begin()
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    optimizer = torch.optim.SGD(model.parameters())
    data = [torch.randn(8 * WIDTH, WIDTH) for _ in range(2)]
    data = [each.pin_memory() for each in data] if pins else data
    side = torch.cuda.Stream() if has_own_stream else torch.cuda.current_stream()
    following = data[0].to(device)
    for number in range(STEPS):
        torch.cuda.current_stream().wait_stream(side)
        x = following
        with torch.cuda.stream(side):
            following = data[number % 2].to(device, non_blocking=non_blocking)
        for _ in range(4):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_prefetched_batch_is_copied_beside_kernels_if_it_is_pinned():
    seconds, shares = {}, {}
    for case in ((True, True, True), (False, True, True), (True, False, True), (True, True, False)):
        seen = foresee(prefetches, 1, case)
        assert copies(seen.traces[0]) == [8 * WIDTH * WIDTH * 4]
        assert seen.host_memory == (2 * 8 * WIDTH * WIDTH * 4,)
        seconds[case], shares[case] = seen.step_seconds, seen.played.roles[0].shares.copies
    (beside, behind), *blocking = (list(seconds.values())[:2], *list(seconds.values())[2:])
    copy = GPU.kernel_seconds + 8 * WIDTH * WIDTH * 4 / (GPU.host_link * GPU.host_link_share)
    assert behind - beside == pytest.approx(copy, rel=0.05)
    assert all(each - beside == pytest.approx(copy, rel=0.05) for each in blocking)
    assert shares[True, True, True] < 0.05 < shares[False, True, True]


def loads(pins, non_blocking, num_workers):
    device = programs.begin()
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    optimizer = torch.optim.SGD(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 64, WIDTH)), 64, pin_memory=pins, num_workers=num_workers)
    for (x,) in loader:
        model(x.to(device, non_blocking=non_blocking)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("pins", "non_blocking", "waits"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_a_batch_of_a_loader_is_copied_and_loading_takes_no_time(pins, non_blocking, waits):
    seen = foresee(loads, 1, (pins, non_blocking, 2))
    trace = seen.traces[0]
    assert (copies(trace), waits_after_copies(trace), computed(trace)) == ([64 * WIDTH * 4], waits, [])
    assert seen.assumptions == ()


def pins():
    programs.begin()
    x = torch.ones(4)
    y = x.pin_memory()
    assert (x.is_pinned(), y.is_pinned(), y.device.type) == (False, True, "cpu")
    assert y.pin_memory() is y
    made = torch.empty(4, pin_memory=True)
    assert (made.is_pinned(), made.device.type) == (True, "cpu")
    assert not made.cuda().is_pinned()


def test_a_tensor_in_pinned_memory_says_so():
    record(pins, 1)


def computes_on_the_host(_):
    device = programs.begin()
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(STEPS):
        out = model(torch.ones(WIDTH, WIDTH, device=device)).cpu()
        (out * 2).to("cuda").sum().backward()
        optimizer.step()


def test_gradients_of_moved_tensors_are_moved_back():
    trace = foresee(computes_on_the_host, 1, (None,)).traces[0]
    moved = [(entry.to_gpu, entry.phase) for entry in trace.entries if isinstance(entry, Copy)]
    assert moved == [(False, "forward"), (True, "forward"), (False, "backward"), (True, "backward")]
    assert [(each.name, each.phase) for each in computed(trace)] == [("mul", "forward"), ("mul", "backward")]


def reads(how):
    device = programs.begin()
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        out = model(torch.ones(8, 8, device=device)).sum()
        if how:
            out.detach().cpu().item()
        out.backward()
        optimizer.step()


def test_a_small_copy_to_the_host_is_no_assumption():
    plain, seen = (foresee(reads, 1, (how,)) for how in (False, True))
    assert [entry.num_bytes for entry in seen.traces[0].entries if isinstance(entry, Copy)] == [4]
    assert sum(isinstance(entry, HostWait) for entry in seen.traces[0].entries) == 1, "not for the number again"
    assert "value of a tensor is 1" in str(seen.assumptions)
    assert (len(seen.assumptions), plain.assumptions) == (1, ())


def begins_on_meta(how):
    device = programs.begin()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to("meta")
    if how == "sharded":
        fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    model.to_empty(device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.ones(8, WIDTH, device=device)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_a_model_may_go_to_the_meta_device_and_get_memory_again(how):
    sizes = live(foresee(begins_on_meta, 2, (how,)).traces[0])
    assert sizes["parameters", False] == (WIDTH * WIDTH + 3 * WIDTH) * 4 // (2 if how == "sharded" else 1)


def moves_by_devices(names):
    device = programs.begin()
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        out = model(torch.ones(WIDTH, WIDTH, device=device))
        host = out.detach().to(torch.device("cpu") if names == "device" else "cpu")
        assert host.device.type == "cpu"
        assert host.to(torch.device("cpu")) is host
        assert host.to(out.device).device == out.device == device
        out.sum().backward()
        optimizer.step()


@pytest.mark.parametrize("names", ["device", "text"])
def test_a_device_that_is_read_from_a_tensor_is_the_goal_of_a_copy(names):
    trace = foresee(moves_by_devices, 1, (names,)).traces[0]
    assert [entry.to_gpu for entry in trace.entries if isinstance(entry, Copy)] == [False, True]


def begins_on_the_host(wrap):
    device = programs.begin()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).cpu()
    if wrap == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    elif wrap == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=device)
    else:
        model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.ones(8, WIDTH, device=device)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("wrap", ["FSDP2", "FSDP1", ""])
def test_a_model_that_was_on_the_host_trains_on_the_gpu(wrap):
    seen = foresee(begins_on_the_host, 2, (wrap,))
    assert (copies(seen.traces[0]), computed(seen.traces[0]), seen.host_memory) == ([], [], (0,))
