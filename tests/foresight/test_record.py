"""Steps of unmodified programs, recorded on fake tensors."""

import os
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import CollectiveMismatch, foresee
from echelon.foresight.record.ranks.communication import reduction_of
from echelon.foresight.record.run import record
from echelon.foresight.roles import digest
from echelon.foresight.trace import Allocate, Collective, Free, HostWait, Kernel, Wait, WaitEvent
from tests.foresight import programs
from tests.helpers.grids import covering

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore::UserWarning:torch")

NUM_PARAMETERS = sum(each.numel() for each in programs.Decoder().parameters())


def traced(program, world_size=4, **options):
    return record(lambda: program(**options), world_size)[0]


def kernels(trace, **facts):
    found = [entry for entry in trace.entries if isinstance(entry, Kernel)]
    return [each for each in found if all(getattr(each, name) == value for name, value in facts.items())]


def collectives(trace):
    return [entry for entry in trace.entries if isinstance(entry, Collective)]


def num_bytes_of(trace, kind):
    return sum(entry.num_bytes for entry in trace.live if entry.kind == kind)


def test_fsdp_step():
    trace = traced(programs.fsdp)
    calls = [(each.kind, each.phase, each.op, each.dtype) for each in collectives(trace)]
    assert Counter(calls) == {
        ("all_gather", "forward", "", "bfloat16"): 3,
        ("all_gather", "backward", "", "bfloat16"): 2,
        ("reduce_scatter", "backward", "mean", "float32"): 3,
    }
    assert len({each.stream for each in collectives(trace)}) == 2  # FSDP2's own streams
    assert any(isinstance(entry, WaitEvent) for entry in trace.entries)
    blocks = [trace.modules[each.module] for each in collectives(trace) if each.phase == "forward"]
    assert blocks[1:] == ["layers.0", "layers.1"]
    assert all("programs.py" in trace.places[each.place] for each in collectives(trace))
    # Forward is a third of all products. Attention of causal masks is half, and its backward 2.5 times that.
    flops = {
        phase: sum(each.flops for each in kernels(trace, phase=phase, kind="matmul"))
        for phase in ("forward", "backward")
    }
    assert flops["backward"] == 2 * flops["forward"] > 0
    attention = kernels(trace, kind="attention")
    assert [each.flops for each in attention] == [4 * 2 * 4 * 32 * 32 * 16 // 2] * 2 + [
        10 * 2 * 4 * 32 * 32 * 16 // 2
    ] * 2
    assert attention[0].shape == (2, 4, 32, 32, 16)
    assert not trace.assumptions


def attends(dtype):
    programs.begin()
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, device="cuda", dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(torch.randn(2, 16, 32, device="cuda", dtype=dtype)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "efficient"), (torch.bfloat16, "flash")])
def test_dropout_in_a_layer_of_torch_leaves_attention_one_kernel(dtype, kernel):
    found = [each.name for each in kernels(traced(lambda: attends(dtype)), kind="attention")]
    name = f"_scaled_dot_product_{kernel}_attention"
    assert found == [name, f"{name}_backward"]


def test_operations_by_which_dtensor_decides_on_shardings_are_not_recorded():
    def program():
        device = programs.begin()
        mesh = init_device_mesh("cuda", (4,))
        rows, weights = (
            distribute_tensor(torch.ones(8, 8, device=device), mesh, [placement])
            for placement in (Shard(0), Replicate())
        )
        return torch._foreach_mul([rows @ weights] * 3, 2.0)

    trace = traced(program)
    assert [each.name for each in kernels(trace)] == ["ones", "ones", "mm", "_foreach_mul"]
    assert kernels(trace, name="mm")[0].shape == (1, 2, 8, 8)


def test_memory_of_the_state_is_exact():
    trace = traced(programs.fsdp, width=128)
    state = sum(each.numel() for each in programs.Decoder(width=128).parameters()) * 4 // 4
    rounding = 512 * 17  # at most a block for each parameter
    assert 0 <= num_bytes_of(trace, "parameters") - state < rounding
    assert 0 <= num_bytes_of(trace, "gradients") - state < rounding
    assert 0 <= num_bytes_of(trace, "optimizer") - 2 * state < 2 * rounding
    # The step ends with as much as it began with.
    sizes = {entry.storage: entry.num_bytes for entry in trace.live}
    live = before = sum(sizes.values())
    for entry in trace.entries:
        if isinstance(entry, Allocate):
            sizes[entry.storage] = entry.num_bytes
            live += entry.num_bytes
        elif isinstance(entry, Free):
            live -= sizes.pop(entry.storage)
    assert live == before


LOSSES = ["mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "soft_margin_loss", "binary_cross_entropy"]


@pytest.mark.parametrize(("name", "reduction"), [*covering(LOSSES, ["mean"]), *covering(LOSSES, ["sum", "none"])])
def test_a_loss_has_the_memory_that_torch_gives_it(name, reduction):
    """torch computes the mean of some losses in the memory of their terms, so that the number keeps all of it."""
    function = getattr(torch.nn.functional, name)

    def loss(device):
        x = torch.full((64, 32), 0.5, device=device)
        return function(x, x[:1].sqrt().expand(64, 32), reduction=reduction)

    def program():
        kept.append(loss("cuda").untyped_storage().nbytes())

    kept = []
    record(program, 1)
    assert kept == [loss("cpu").untyped_storage().nbytes()]


class Gathered(torch.autograd.Function):
    """`gather` with a gradient of its own, which makes a new tensor."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        return x.gather(1, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad.new_zeros(8, 8).scatter_add(1, index, grad), None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x, index: x.gather(1, index), "scatter_add_"),
        (lambda x, _: x.topk(2).values, "scatter_"),
        (lambda x, _: x.max(-1).values, "scatter_"),
        (lambda x, index: x[index[:, 0]], "index_put_"),
        (lambda x, index: x.index_select(0, index[:, 0]), "index_add_"),
        (lambda x, index: x.take(index), "put_"),
        (Gathered.apply, "scatter_add"),
        (lambda x, index: x.put(index, x.detach()[:, :2]), "put"),  # the gradient of x, which is no sum
    ],
)
def test_gradients_of_chosen_values_take_no_second_tensor(function, name):
    """torch writes them into a tensor of zeros, but makes a new one of fake tensors."""

    def program():
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        function(x, torch.zeros(8, 2, dtype=torch.long, device="cuda")).square().sum().backward()

    backward = [each.name for each in kernels(record(program, 1)[0], phase="backward")]
    assert [each for each in backward if each.startswith(("scatter", "index", "put"))] == [name]


class Doubled(torch.autograd.Function):
    """2 x, whose gradient the program itself adds up."""

    @staticmethod
    def forward(_, x):
        return 2 * x

    @staticmethod
    def backward(_, grad):
        return grad + grad


def held(x, gradients):
    """The gradient of 3 x is that of the other term, too."""
    scaled = 3 * x
    scaled.register_hook(gradients.append)
    return x + scaled


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x, _: x.sin() * x.cos(), "add_"),
        (lambda x, _: x + x.sin(), "add_"),
        (held, "add"),
        (lambda x, _: x.mean() + x.sum(), "add"),  # from one number, which has no room for others
        (lambda x, _: Doubled.apply(x), "add"),
    ],
)
def test_gradients_of_a_tensor_are_added_up_in_place_if_nobody_else_has_them(function, name):
    """As torch does. Of fake tensors it makes a third gradient."""
    gradients = []

    def program():
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        function(2 * x, gradients).square().sum().backward()

    backward = [each.name for each in kernels(record(program, 1)[0], phase="backward")]
    assert [each for each in backward if each.startswith("add")] == [name]


@pytest.mark.parametrize("recompute", ["full", "reentrant", "selective"])
def test_checkpointing_repeats_the_forward(recompute):
    trace = traced(programs.fsdp, recompute=recompute)
    repeated = Counter(each.name for each in kernels(trace, phase="recompute"))
    assert repeated["silu"] == 2
    assert repeated["mm"] == ({"selective": 0, "full": 10, "reentrant": 12}[recompute])


def frozen_layer():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False, device="cuda") for _ in range(2)))
    model[0].requires_grad_(False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model[1].parameters())
    for _ in range(2):
        model(torch.ones(2, 64, device="cuda")).sum().backward()
        optimizer.step()


def test_frozen_parameters_count_as_parameters():
    assert num_bytes_of(traced(frozen_layer), "parameters") == 2 * 64 * 64 * 4 // 4


def test_ddp_step():
    trace = traced(programs.ddp)
    (call,) = collectives(trace)
    assert (call.kind, call.op, call.num_bytes, call.blocking) == ("all_reduce", "sum", 4 * NUM_PARAMETERS, False)
    (wait,) = (entry for entry in trace.entries if isinstance(entry, Wait))
    assert wait.number == call.number
    assert len(kernels(trace, phase="optimizer")) < 10  # foreach, as on a GPU


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
)
def test_options_of_ddp(options):
    assert [each.kind for each in collectives(traced(programs.ddp, **options))] == ["all_reduce"]


def joined():
    device = programs.begin()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8, device=device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters())
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2):
            model(torch.ones(2, 8, device=device)).sum().backward()
            optimizer.step()


def test_gradients_of_uneven_inputs_are_divided_by_the_ranks_that_are_left():
    kinds = [each.kind for each in collectives(traced(joined))]
    assert kinds.count("all_reduce") >= 2, "of the gradients, and of the number of ranks"


def test_tensor_parallel_step():
    trace = traced(programs.tensor_parallel)
    by_group = Counter(trace.groups[each.group].name for each in collectives(trace))
    assert by_group == {"tp": 26, "dp": 8}
    assert {trace.groups[each.group].ranks for each in collectives(trace)} == {(0, 1), (0, 2)}
    waits = {entry.number for entry in trace.entries if isinstance(entry, Wait)}
    assert waits >= {each.number for each in collectives(trace) if not each.blocking}


@pytest.mark.slow
def test_fsdp1_step():
    calls = Counter(each.kind for each in collectives(traced(programs.fsdp1)))
    assert calls == {"all_gather": 5, "reduce_scatter": 3}


def test_autocast_computes_as_on_a_gpu():
    trace = traced(programs.ddp, autocast=torch.bfloat16)
    assert {each.dtype for each in kernels(trace, kind="matmul")} == {"bfloat16"}
    assert {each.dtype for each in kernels(trace, name="_log_softmax")} == {"float32"}


def test_microbatches_are_one_step():
    trace = traced(programs.ddp, accumulate=3)
    assert len(kernels(trace, name="embedding")) == 3


def scaled():
    """Mixed precision with a GradScaler, a check of the loss, and data from workers."""
    device = programs.begin()
    model = programs.Decoder(1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    data = DataLoader(TensorDataset(torch.randint(0, programs.VOCAB, (64, 32))), 4, num_workers=2, pin_memory=True)
    for (tokens,) in data:
        tokens = tokens.to(device, non_blocking=True)
        with torch.autocast("cuda", torch.float16):
            loss = model(tokens).float().square().mean()
        if torch.isnan(loss):
            raise ValueError("the loss is not a number")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"loss {loss.item():.3f} {torch.cuda.max_memory_allocated() >> 20}")


def test_values_are_assumed_with_their_lines(capsys):
    trace = record(scaled, 2)[0]
    assert trace.is_step
    assert [text.rpartition(":")[0] for text in trace.assumptions] == [
        "no value is infinite or not a number at tests/foresight/test_record.py",
        "a value of a tensor is 1 at tests/foresight/test_record.py",
    ]
    assert capsys.readouterr().out.startswith("loss 1.000")
    assert any(isinstance(entry, HostWait) for entry in trace.entries)


def test_program_without_an_optimizer_is_recorded_whole():
    def main():
        programs.begin()
        dist.all_reduce(torch.ones(8, device="cuda"))

    trace = record(main, 2)[0]
    assert not trace.is_step
    assert [each.num_bytes for each in collectives(trace)] == [32]


def test_the_record_is_deterministic_and_equal_on_equal_ranks():
    first = record(programs.fsdp, 4, (0, 3))
    again = record(programs.fsdp, 4, (2,))
    assert len({digest(trace) for trace in (*first.values(), *again.values())}) == 1


def names_of_cuda():
    return {name: value for name, value in vars(torch.cuda).items() if not name.startswith("__")}


def test_the_process_is_as_before():
    before = names_of_cuda(), dict(vars(torch.cpu)), dict(os.environ), torch.save, open, torch.UntypedStorage.resize_
    methods = torch.nn.Module._apply, torch.optim.Optimizer.__init__, torch.autocast.__init__, DataLoader.__init__
    foreign = {name: vars(module).get("save") for name, module in sys.modules.items() if module is not None}
    record(programs.ddp, 2)
    after = names_of_cuda(), dict(vars(torch.cpu)), dict(os.environ), torch.save, open, torch.UntypedStorage.resize_
    assert before == after
    assert methods == (
        torch.nn.Module._apply,
        torch.optim.Optimizer.__init__,
        torch.autocast.__init__,
        DataLoader.__init__,
    )
    assert foreign == {name: vars(sys.modules[name]).get("save") for name in foreign}
    assert not torch.cuda.is_available()
    assert not dist.is_initialized()
    assert type(torch.ones(1)) is torch.Tensor
    torch.testing.assert_close(programs.Mlp()(torch.zeros(1, programs.WIDTH)), torch.zeros(1, programs.WIDTH))


def test_views_in_place_launch_nothing():
    def program():
        x = torch.empty(4, 1, 8, device="cuda")
        x.squeeze_(1).unsqueeze_(0).transpose_(0, 1).swapaxes_(1, 2).as_strided_((8, 4), (1, 8)).t_().detach_()

    assert not [each for each in record(program, 1)[0].entries if isinstance(each, Kernel)]


def exchanging():
    """Ranks that tell each other Python objects, some of which only one rank has."""
    programs.begin()
    rank, n = dist.get_rank(), dist.get_world_size()
    names = [None] * n
    dist.all_gather_object(names, "same")
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, src=n - 1)
    dist.barrier()
    dist.all_reduce(torch.ones(8 if told == [f"from {n - 1}"] and names == ["same"] * n else 1, device="cuda"))


def test_objects_are_real_and_a_rank_that_has_one_is_run():
    traces = record(exchanging, 8)
    assert list(traces) == [0, 7]
    assert collectives(traces[0])[-1].num_bytes == 32


def disagreeing():
    programs.begin()
    if dist.get_rank() == 0:
        dist.barrier()
    dist.broadcast_object_list([1], src=1)


def test_collectives_of_objects_are_compared():
    with pytest.raises(CollectiveMismatch, match=r"test_record.py:\d+.*test_record.py:\d+"):
        record(disagreeing, 2, (0, 1))


def draw_by_a_generator():
    device = programs.begin()
    generator = torch.Generator(device).manual_seed(1)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.randint(5, (3,), device=device, generator=generator).shape == (3,)
    # As Accelerate makes the order of the data equal on all ranks. Megatron sets states of `torch.cuda` this way.
    of_gpu = torch.cuda.default_generators[device.index]
    of_gpu.set_state(torch.cuda.get_rng_state())
    for each in (torch, generator, torch.Generator(), of_gpu):
        get, put = (each.get_rng_state, each.set_rng_state) if each is torch else (each.get_state, each.set_state)
        put(get())
        state = get().to(device)
        dist.broadcast(state, 0)
        put(state.cpu())


ABSENT = "ranks that are not recorded contribute the values of a recorded one to"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: dist.all_gather_object([None] * 2, dist.get_rank()), f"{ABSENT} all_gather_object"),
        (lambda: dist.gather_object(1, None if dist.get_rank() else [None] * 2), f"{ABSENT} gather_object"),
        (
            lambda: dist.all_reduce(torch.tensor([dist.get_rank()]).cuda()),
            "all ranks contribute the same value to all_reduce",
        ),
        (lambda: dist.broadcast_object_list([dist.get_rank()], src=1), None),
        (lambda: dist.scatter_object_list([None], [0, 1], src=0), None),
        (lambda: dist.barrier(), None),
    ],
    ids=["all_gather_object", "gather_object", "all_reduce", "broadcast", "scatter", "barrier"],
)
def test_values_of_absent_ranks_are_assumed_with_their_line(call, text):
    def program():
        programs.begin()
        call()

    found = [each.rpartition(" at ")[0] for each in record(program, 2)[0].assumptions]
    assert found == ([] if text is None else [text])


def test_nothing_is_assumed_if_all_ranks_of_a_group_have_contributed():
    def program():
        programs.begin()
        dist.all_gather_object([None] * 2, dist.get_rank())

    first, last = record(program, 2, (0, 1)).values()
    assert first.assumptions
    assert not last.assumptions


def test_facts_that_a_library_exchanges_are_no_assumption():
    def program():
        programs.begin()
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda())
        distribute_tensor(torch.ones(2, 2).cuda(), init_device_mesh("cuda", (2,)), [Shard(0)])

    def of_echelon(group):
        echelon.DDP(torch.nn.Linear(2, 2).cuda(), group)

    assert not record(program, 2)[0].assumptions
    assert not record(of_echelon, 2)[0].assumptions


def test_generators_of_a_gpu_can_be_made():
    original = torch.Generator
    assert record(draw_by_a_generator, 2)[0].rank == 0
    assert torch.Generator is original


def test_reductions_have_names_also_if_torch_has_new_ones():
    known = {name: reduction_of(SimpleNamespace(op=op)) for name, op in dist.ReduceOp.RedOpType.__members__.items()}
    assert known["AVG"] == "mean"
    assert known["SUM"] == known["PREMUL_SUM"] == "sum"
    assert known["BXOR"] == "bxor"
    assert reduction_of(SimpleNamespace(op=SimpleNamespace(name="NEW"))) == "new"


def compiled():
    programs.begin()
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).cuda()
    inner.compile(mode="max-autotune")
    whole, loss = torch.compile(torch.nn.Linear(8, 8).cuda()), torch.compile(dynamic=False)(lambda x: x.exp().sum())
    optimizer = torch.optim.SGD([*inner.parameters(), *whole.parameters()])
    while True:
        loss(whole(inner(torch.ones(2, 8, device="cuda"))).tanh()).backward()
        optimizer.step()


def test_compiled_code_runs_as_eager_code_and_its_kernels_are_marked():
    before = torch.compile, torch.nn.Module.compile
    trace = traced(compiled, 2)
    text = "torch.compile was taken as fused runs of elementwise kernels"
    assert {each.rpartition(" at ")[0] for each in trace.assumptions} == {text}
    assert len(trace.assumptions) == 2  # by line
    marked = {each.name: each.is_compiled for each in kernels(trace)}
    names = ("addmm", "gelu", "gelu_backward", "exp", "tanh", "tanh_backward")
    assert [marked[name] for name in names] == [True] * 4 + [False] * 2
    assert not any(each.is_compiled for each in kernels(trace) if each.phase == "optimizer")
    assert (torch.compile, torch.nn.Module.compile) == before


@pytest.mark.parametrize(
    ("program", "modules"),
    [
        # The last collective is that of the outermost module, after the last node of the backward.
        (programs.fsdp, ["layers.1", "layers.0", "layers.1", "layers.0", "FSDPDecoder"]),
        # By the parameter whose gradient completes the bucket.
        (programs.ddp, ["embedding"]),
    ],
)
def test_communication_of_a_backward_belongs_to_a_module(program, modules):
    seen = foresee(program, 2)
    trace = seen.traces[0]
    found = [each for each in trace.entries if isinstance(each, Collective) and each.phase == "backward"]
    assert [trace.modules[each.module] for each in found] == modules
    shown = [each for names in seen.played.exposed_modules.values() for each in names]
    assert re.sub(r"\d", "*", modules[-1]) in shown


def numbered_cpu():
    plain = torch.ones(4, 4)
    moved = plain.to("cpu:0")
    made = torch.zeros_like(plain, device=torch.device("cpu", 0))
    assert [each.device for each in (moved, made, plain + moved + made)] == [torch.device("cpu")] * 3


@pytest.mark.parametrize("gpu", ["cpu", "h100"])
def test_a_tensor_on_the_cpu_has_no_number(gpu):
    """A real one says cpu. Hugging Face's Trainer compares its device with that of a tensor that it has moved."""
    foresee(numbered_cpu, 1, gpu=gpu)


def coalesces():
    dist.init_process_group("nccl")
    ones = [torch.ones(4, device="cuda") for _ in range(2)]
    for is_async in (False, True):
        with dist._coalescing_manager(device=ones[0].device, async_ops=is_async) as manager:
            for each in ones:
                dist.all_reduce(each)
        if is_async:
            manager.wait()


def test_coalesced_collectives_of_a_device_are_one():
    trace = traced(coalesces)
    assert [each.num_bytes for each in collectives(trace)] == [32, 32]
    assert sum(isinstance(each, Wait) for each in trace.entries) == 1  # the asynchronous one


def waits_for_keys():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 29500, world_size, rank == 0)
    store.set(f"key {rank}", str(rank))
    assert int(store.get(f"key {world_size - 1}")) == world_size - 1
    torch.ones(2, device="cuda").sum()


def test_a_rank_waits_for_the_key_of_a_rank_that_is_not_recorded_yet():
    assert foresee(waits_for_keys, 8).step_seconds > 0


def sends_optimizer_states():
    dist.init_process_group("nccl")
    model = torch.nn.Linear(4, 4, device="cuda")
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_optimizer_state_dict(model, optimizer, options=full)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, states if dist.get_rank() == 0 else {}, options=sent)


def test_numbers_of_an_optimizer_are_pickled_with_their_values():
    """Pickling them uses torch.save into a buffer, which is skipped for a program's own state."""
    assert foresee(sends_optimizer_states, 4).step_seconds > 0
