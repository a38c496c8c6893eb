"""Idioms of training scripts that depend on values, on memory or on names of CUDA."""

import copy
import functools
import importlib
import os
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel

from echelon import UnsupportedOp, foresee
from echelon.foresight.record import recorder
from echelon.foresight.trace import Collective, Kernel
from tests.foresight import programs
from tests.helpers.grids import covering


def steps(model, x, count=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def draws_batches():
    data = np.arange(1000)
    starts = torch.randint(len(data) - 32, (4,))
    x = torch.stack([torch.from_numpy(data[each : each + 32]) for each in starts])
    assert x.shape == (4, 32)
    assert len(set(starts.tolist())) == 4
    assert sorted(torch.randperm(10).tolist()) == list(range(10))
    assert all(5 <= each < 8 for each in torch.randint(5, 8, (2, 9)).flatten().tolist())
    assert torch.tensor([3, 4])[1].item() == 4
    assert torch.tensor([[3, 4], [5, 6]]).sum(0).tolist() == [8, 10]
    steps(nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 8)).cuda(), x.cuda())


def copies_models():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).cuda()
    copied = copy.deepcopy(model)
    assert [each.shape for each in copied.parameters()] == [each.shape for each in model.parameters()]
    assert not {id(each) for each in copied.parameters()} & {id(each) for each in model.parameters()}
    assert copy.deepcopy(torch.tensor(3)).item() == 3
    twice = copy.deepcopy([model.layers[0].linear1.weight] * 2)
    assert twice[0] is twice[1]
    steps(copied, torch.randn(2, 4, 8, device="cuda"))


def makes_models_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.to_empty(device=torch.device("cuda", 0))
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    steps(model, torch.randn(2, 8, device="cuda"))


def draws_weights_within_bounds():
    model = nn.Linear(8, 8)
    nn.init.trunc_normal_(model.weight, std=0.02)
    nn.init.trunc_normal_(model.weight, mean=1.0, a=0.9, b=1.1)
    steps(model.cuda(), torch.randn(2, 8, device="cuda"))


def prefetches():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(2, 8).cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream())
    torch.cuda.memory._record_memory_history()
    assert torch.version.cuda
    assert torch.backends.cudnn.is_available()
    assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
    steps(nn.Linear(8, 8).cuda(), x)


@pytest.mark.parametrize(
    "program", [draws_batches, copies_models, makes_models_on_meta, draws_weights_within_bounds, prefetches]
)
@pytest.mark.filterwarnings("ignore:mean is more than 2 std:UserWarning", "ignore:enable_nested_tensor:UserWarning")
def test_it_runs(program):
    version = torch.version.cuda
    assert foresee(program, 1, gpu="h100").step_seconds > 0
    assert torch.version.cuda == version


@pytest.mark.parametrize("gpu", ["h100", "cpu"])
def test_inference_mode_has_the_kernels_of_no_grad(gpu):
    """In torch's own mode, products come to no dispatch mode as products."""

    def program(mode):
        device = "cuda" if gpu == "h100" else "cpu"
        teacher, student = nn.Linear(8, 8).to(device), nn.Linear(8, 8).to(device)
        x = torch.ones(4, 8, device=device)

        @mode()
        def teach():
            with torch.inference_mode(False):
                assert torch.is_grad_enabled()
            return nn.functional.cross_entropy(teacher(x), x), teacher(x)

        assert not teach()[0].requires_grad
        (student(x) - teach()[1].clone()).square().mean().backward()

    found = [foresee(program, 1, (mode,), gpu=gpu) for mode in (torch.no_grad, torch.inference_mode)]
    kernels = [[each for each in seen.traces[0].entries if isinstance(each, Kernel)] for seen in found]
    assert [each.name for each in kernels[0]] == [each.name for each in kernels[1]]
    assert sum(each.flops for each in kernels[1]) == 2 * 4 * 8 * 8 * 6


@pytest.mark.parametrize("gpu", ["h100", "cpu"])
def test_inference_mode_says_that_it_is_enabled(gpu):
    def program():
        seen = []
        assert not torch.is_inference_mode_enabled()
        with torch.inference_mode():
            seen.append(torch.is_inference_mode_enabled())
            with torch.inference_mode(False):
                seen.append(torch.is_inference_mode_enabled())
            seen.append(torch.is_inference_mode_enabled())
            torch.ones(2).sum()
        assert [*seen, torch.is_inference_mode_enabled()] == [True, False, True, False]

    foresee(program, 1, gpu=gpu)


def normalizes(wrapped):
    device = programs.begin()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index]) if wrapped else model
    steps(model, torch.randn(4, 8, device=device))


@pytest.mark.parametrize("wrapped", [False, True])
def test_sync_batch_norm_gathers_statistics_and_adds_up_gradients(wrapped):
    seen = foresee(normalizes, 2, (wrapped,))
    kinds = [each.kind for each in seen.played.roles[0].program.trace.entries if type(each).__name__ == "Collective"]
    # DDP broadcasts the buffers first, and adds up the gradients of its bucket last.
    assert kinds[-3 if wrapped else -2 :][:2] == ["all_gather", "all_reduce"]
    assert len(kinds) == (5 if wrapped else 2)


def copies_to_all_gpus():
    model = nn.Linear(8, 8).cuda()
    nn.DataParallel(model)(torch.randn(4, 8)).sum().backward()  # it moves its inputs


def test_a_data_parallel_of_one_gpu_is_its_module():
    assert foresee(copies_to_all_gpus, 1, gpu="h100").step_seconds > 0
    with pytest.raises(UnsupportedOp, match="DataParallel on 2 GPUs is not foreseen: use DistributedDataParallel"):
        foresee(copies_to_all_gpus, 2, gpu="h100", hosts=1)


def synchronizes_parameters():
    device = programs.begin()
    model = FullyShardedDataParallel(nn.Linear(8, 8).to(device), device_id=device, sync_module_states=True)
    steps(model, torch.randn(4, 8, device="cuda"))


def test_fsdp1_may_synchronize_its_parameters_before_the_step():
    entries = foresee(synchronizes_parameters, 2).traces[0].entries
    assert {each.kind for each in entries if isinstance(each, Collective)} == {"all_gather", "reduce_scatter"}


def waits_for_values(rounds):
    x = torch.ones(2, device="cuda")
    while (x > 2).any():
        x = x * 2
        rounds -= 1
        if not rounds:
            break
    steps(nn.Linear(2, 2).cuda(), x)


def test_a_loop_that_goes_by_values_is_refused_at_its_line(monkeypatch):
    monkeypatch.setattr(recorder, "_MOST_READS", {True: 1_000, False: 1_000})
    assert foresee(waits_for_values, 1, (3,)).step_seconds > 0
    with pytest.raises(
        UnsupportedOp, match=r"a loop at .*test_idioms.py:\d+ goes on for 1,000 rounds.*number of rounds"
    ):
        foresee(waits_for_values, 1, (-1,))


def test_a_device_without_a_number_is_not_set():
    with pytest.raises(ValueError, match="specified index"):
        foresee(lambda: torch.cuda.set_device(torch.device("cuda")), 1)


def test_a_limit_of_memory_is_an_assumption():
    seen = foresee(lambda: torch.cuda.set_per_process_memory_fraction(0.5, device=0), 1)
    assert any(each.startswith("torch.cuda.set_per_process_memory_fraction sets no limit") for each in seen.assumptions)


@pytest.mark.parametrize("read", [lambda x: x.argmax() != 3, lambda x: x.max().item() > 0.1])
def test_a_loop_that_waits_for_a_choice_or_a_number_is_refused(read, monkeypatch):
    monkeypatch.setattr(recorder, "_MOST_READS", {True: 100, False: 100})

    def program():
        while read(torch.randn(8, 1, device="cuda")):
            pass

    with pytest.raises(UnsupportedOp, match="goes on for 100 rounds"):
        foresee(program, 1)


def test_positions_of_known_numbers_are_no_choice():
    def program():
        x = torch.arange(5)
        assert x[x > 2].tolist() == [3, 4]
        steps(nn.Linear(2, 2).cuda(), torch.randn(2, 2, device="cuda"))

    assert not foresee(program, 1).assumptions


def captures():
    assert torch.cuda.CUDAGraph | None  # as in annotations of libraries
    torch.cuda.CUDAGraph()


def test_cuda_graphs_are_refused_by_one_line():
    with pytest.raises(UnsupportedOp, match=r"^a CUDA graph at .*test_idioms.py:\d+ is not foreseen"):
        foresee(captures, 1)


def test_launches_of_the_host_are_no_contention():
    shares = foresee(prefetches, 1, gpu="h100").played.roles[0].shares
    assert shares.contention < 1e-9
    assert shares.idle > 0.3
    assert abs(sum(shares.kernels.values()) + sum(shares[1:]) - 1) < 1e-9


def adds_in_groups(backend):
    dist.init_process_group(backend)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.all_reduce(torch.ones(8, device="cuda"), group=dist.new_group([0, 1]))


@pytest.mark.parametrize("backend", [None, "cpu:gloo,cuda:nccl"])
def test_later_groups_have_the_backends_of_the_first(backend):
    assert not any("backend" in each for each in foresee(adds_in_groups, 2, (backend,)).assumptions)


def chooses_a_branch(x):
    return torch.cond(x.sum() > 0, lambda each: each * 2, lambda each: each * 3, (x,))


def fits_a_line(x):
    return torch.linalg.lstsq(x, x).solution


def computes(function):
    layer = nn.Linear(8, 8).cuda()
    function(layer(torch.ones(8, 8, device="cuda"))).sum().backward()


@pytest.mark.parametrize(("name", "function"), [("cond", chooses_a_branch), ("linalg_lstsq", fits_a_line)])
def test_an_operator_whose_result_is_unknown_is_refused_at_its_line(name, function):
    with pytest.raises(UnsupportedOp, match=rf"^{name} at .*test_idioms\.py:\d+: torch cannot tell its result without"):
        foresee(computes, 1, (function,), gpu="h100")


def test_close_tensors_are_an_assumption():
    seen = foresee(computes, 1, (lambda x: x if torch.allclose(x, x) else None,), gpu="h100")
    assert any(each.startswith("two tensors are close at ") for each in seen.assumptions)


@functools.cache
def compiled_attention():
    return torch.compile(flex_attention)


class Attention(nn.Module):
    """Attention with two query heads for each key head."""

    def __init__(self, how):
        super().__init__()
        self.query, self.both = nn.Linear(128, 128), nn.Linear(128, 128)
        self.how = how

    def forward(self, x):
        query = self.query(x).unflatten(2, (4, 32)).transpose(1, 2)
        key, value = self.both(x).unflatten(2, (4, 32)).transpose(1, 2).chunk(2, 1)
        if self.how.startswith("sdpa"):
            is_causal = self.how == "sdpa causal"
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        mask = None
        if self.how == "causal":
            mask = create_block_mask(lambda _, __, query, key: query >= key, None, None, 256, 256, device="cuda")
        attention = compiled_attention() if self.how == "compiled" else flex_attention
        return attention(query, key, value, block_mask=mask, enable_gqa=True)


def attends(how):
    steps(Attention(how).to("cuda", torch.bfloat16), torch.ones(2, 256, 128, device="cuda", dtype=torch.bfloat16))


def attention_of(how):
    compiled_attention()  # before the recording
    seen = foresee(attends, 1, (how,), gpu="h100")
    kernels = [each for each in seen.traces[0].entries if getattr(each, "kind", "") == "attention"]
    return [(each.name, each.flops, each.dtype) for each in kernels], seen.assumptions


@pytest.mark.parametrize("how", ["plain", "causal", "compiled"])
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_flex_attention_counts_as_flash_attention(how):
    expected, nothing = attention_of("sdpa causal" if how == "causal" else "sdpa")
    found, assumptions = attention_of(how)
    assert len(expected) == 2
    assert nothing == ()
    assert found == expected
    words = "flex_attention takes the time of flash attention"
    words += ", and its mask that of a causal one" if how == "causal" else ""
    earlier = ["a function that was compiled earlier counts as not compiled"] if how == "compiled" else []
    assert [each.partition(" at ")[0] for each in assumptions] == [*earlier, words]


def test_masked_flex_attention_of_a_part_of_the_queries_sees_half_of_the_pairs():
    """As in context parallelism, where each rank has queries from the begin and from the end."""

    def program():
        query, key = (torch.ones(1, 2, length, 32, device="cuda", dtype=torch.bfloat16) for length in (128, 256))
        mask = create_block_mask(lambda _, __, query, key: query >= key, None, None, 128, 256, device="cuda")
        flex_attention(query, key, key, block_mask=mask)

    entries = foresee(program, 1, gpu="h100").traces[0].entries
    assert [each.flops for each in entries if getattr(each, "kind", "") == "attention"] == [4 * 2 * 128 * 256 * 32 // 2]


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_is_causal_attention(bias):
    def program(mask):
        x = torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        options = {"attn_mask": bias(128, 128)} if mask else {"is_causal": True}
        nn.functional.scaled_dot_product_attention(x, x, x, **options).sum().backward()

    found, expected = (foresee(program, 1, (mask,)) for mask in (True, False))
    assert found.traces[0].entries == expected.traces[0].entries


@pytest.mark.parametrize("mask", [None, torch.bool])
def test_attention_of_cudnn_is_a_kernel_like_flash_attention(mask):
    def program():
        x = torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        bias = None if mask is None else torch.ones(128, 128, device="cuda", dtype=mask)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            nn.functional.scaled_dot_product_attention(x, x, x, bias).sum().backward()

    kernels = [each for each in foresee(program, 1).traces[0].entries if getattr(each, "kind", "") == "attention"]
    product = 2 * 4 * 128 * 128 * 64
    assert [(each.name, each.flops) for each in kernels] == [
        ("_scaled_dot_product_cudnn_attention", 2 * product),
        ("_scaled_dot_product_cudnn_attention_backward", 5 * product),
    ]


@pytest.mark.parametrize(
    ("shape", "heads_of_keys", "dtype", "options"),
    [
        ((2, 8, 16, 32), 2, torch.bfloat16, {"enable_gqa": True, "attn_mask": True}),
        ((2, 8, 16, 32), 1, torch.bfloat16, {}),
        ((2, 8, 16, 32), 8, torch.float64, {}),
        ((8, 16, 32), None, torch.bfloat16, {}),
    ],
    ids=["grouped queries with a mask", "one head of keys", "float64", "no heads"],
)
def test_attention_without_a_kernel_of_its_own_is_products(shape, heads_of_keys, dtype, options):
    def program():
        query = torch.randn(shape, device="cuda", dtype=dtype)
        key = query if heads_of_keys is None else query[:, :heads_of_keys]
        mask = torch.ones(16, 16, device="cuda", dtype=torch.bool) if "attn_mask" in options else None
        nn.functional.scaled_dot_product_attention(query, key, key, **{**options, "attn_mask": mask})

    kernels = [each for each in foresee(program, 1).traces[0].entries if getattr(each, "flops", 0)]
    assert [each.name for each in kernels] == ["bmm", "bmm"]


def test_attention_that_the_program_allows_no_kernel_is_an_error():
    def program():
        x = torch.randn(2, 4, 16, 32, device="cuda")
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            nn.functional.scaled_dot_product_attention(x, x, x)

    with pytest.raises(RuntimeError, match=r"No available kernel.*SDPBackend\.MATH"):
        foresee(program, 1)


def clips():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10))).cuda()
    model(torch.randn(2, 8, device="cuda")).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    steps(model, torch.randn(2, 8, device="cuda"), count=1)


def test_gradients_are_clipped_by_a_kernel_for_many_of_them():
    kernels = [each for each in foresee(clips, 1).traces[0].entries if type(each).__name__ == "Kernel"]
    names = [each.name for each in kernels if each.phase == "other"]
    assert names.count("_foreach_norm") == names.count("_foreach_mul_") == names.count("linalg_vector_norm") == 1


def uses_older_names():
    x = torch.cuda.FloatTensor(3)
    assert x.shape == (3,)
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.LongTensor)
    assert torch.cuda.LongTensor([1, 2]).dtype == torch.int64
    assert x.type(torch.cuda.HalfTensor).dtype == x.type("torch.cuda.HalfTensor").dtype == torch.float16
    assert x.type(torch.float64).dtype == torch.float64
    steps(nn.Linear(3, 3).cuda(), torch.cuda.FloatTensor(2, 3))


def asks_for_memory():
    x = torch.randn(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() == torch.cuda.memory.memory_allocated() >= x.nbytes
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory.reset_peak_memory_stats(device="cuda:0")
    torch.accelerator.memory.empty_cache()
    assert torch.accelerator.memory.memory_allocated() == torch.cuda.memory_allocated()
    assert torch.cuda.memory_stats()["allocation.all.current"] == 0
    assert torch.cuda.memory_snapshot() == torch.cuda.memory._snapshot()["segments"] == []
    assert torch.cuda.temperature() == torch.cuda.power_draw() == 0
    steps(nn.Linear(8, 8).cuda(), torch.randn(2, 8, device="cuda"))


def marks_ranges():
    torch.cuda.profiler.start()
    torch.cuda.cudart().cudaProfilerStart()
    with torch.autograd.profiler.emit_nvtx(), torch.cuda.nvtx.range("step"):
        steps(nn.Linear(8, 8).cuda(), torch.randn(2, 8, device="cuda"))


def sets_up_its_device():
    assert torch.cuda.get_allocator_backend() == torch.cuda.memory.get_allocator_backend() == "native"
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.cuda.tunable.enable()
    torch.backends.cuda.preferred_linalg_library("cusolver")
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        x = torch.randn(2, 8, device="cuda")
    torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(1024))
    steps(nn.Linear(8, 8).cuda(), x)


def asks_for_facts():
    properties = torch.cuda.get_device_properties("cuda")
    assert properties.shared_memory_per_multiprocessor > properties.shared_memory_per_block_optin
    assert properties.uuid is not None
    assert torch.backends.cudnn.version() > 90000
    assert torch.backends.cuda.is_flash_attention_available()
    lowest, highest = torch.cuda.Stream.priority_range()
    assert lowest > highest
    steps(nn.Linear(8, 8).cuda(), torch.randn(2, 8, device="cuda"))


def uses_streams_and_states_by_name():
    with torch.cuda.stream(torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)):
        x = torch.randn(2, 8, device="cuda")
    torch.cuda.random.set_rng_state(torch.cuda.get_rng_state(device="cuda"), device="cuda")
    for device in (0, "cuda", torch.device("cuda"), None):
        with torch.cuda.device(device):
            steps(nn.Linear(8, 8).cuda(), x, count=1)


def sets_a_default_type():
    torch.set_default_tensor_type(torch.cuda.HalfTensor)
    assert (torch.ones(1).device.type, torch.ones(1).dtype) == ("cuda", torch.float16)
    torch.set_default_tensor_type("torch.FloatTensor")
    assert (torch.ones(1).device.type, torch.ones(1).dtype) == ("cpu", torch.float32)
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    steps(nn.Linear(8, 8), torch.randn(2, 8))


def takes_the_plain_module_out_of_the_compiled_one():
    model = torch.compile(nn.Linear(8, 8).cuda())
    assert model._orig_mod.weight is model.weight
    assert not hasattr(model._orig_mod, "_orig_mod")
    assert list(model.state_dict()) == ["weight", "bias"]
    steps(model, torch.randn(2, 8, device="cuda"))


def looks_for_values_that_are_not_finite():
    x = torch.randn(4, device="cuda")
    assert not (x != x).any()  # a number that is none
    assert not (~torch.isfinite(x)).any()
    assert not torch.logical_not(x.isfinite()).any()
    assert not (x.abs() == float("inf")).any()
    assert torch.isfinite(x).all()
    assert torch.isfinite(x).sum() == x.numel()
    assert not (x.isfinite().sum() != x.numel()).item()
    steps(nn.Linear(8, 8).cuda(), torch.randn(2, 8, device="cuda"))


def writes_to_arrays():
    assert np.asarray(torch.tensor([0.5, 1.5])).tolist() == torch.tensor([0.5, 1.5]).numpy().tolist() == [0.5, 1.5]
    values = torch.randn(4, device="cuda").cpu().numpy()
    values /= 2
    values[0] = 3
    steps(nn.Linear(8, 8).cuda(), torch.randn(2, 8, device="cuda"))


@pytest.mark.parametrize(
    "program",
    [
        uses_older_names,
        asks_for_memory,
        marks_ranges,
        sets_up_its_device,
        asks_for_facts,
        uses_streams_and_states_by_name,
        sets_a_default_type,
        takes_the_plain_module_out_of_the_compiled_one,
        looks_for_values_that_are_not_finite,
        writes_to_arrays,
    ],
)
def test_names_of_cuda_work(program):
    assert foresee(program, 1).step_seconds > 0


@pytest.mark.parametrize(
    ("name", "foreach"),
    covering(["Adam", "NAdam", "RAdam", "RMSprop", "Adamax", "Adadelta", "ASGD", "Rprop"], [None, False]),
)
def test_optimizers_may_be_capturable(name, foreach):
    def program():
        layer = nn.Linear(8, 8, device="cuda")
        optimizer = getattr(torch.optim, name)(layer.parameters(), capturable=True, foreach=foreach)
        for _ in range(2):
            layer(torch.randn(2, 8, device="cuda")).sum().backward()
            optimizer.step()

    module = sys.modules[f"torch.optim.{name.lower()}"]
    names = [each for each in vars(module) if "capturable" in each]
    before = [vars(module)[each] for each in names]
    assert any(each.phase == "optimizer" for each in foresee(program, 1).traces[0].entries if isinstance(each, Kernel))
    assert [vars(module)[each] for each in names] == before


def is_profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        assert not profiler.profiler.use_device  # torch would log an error for each operator
    steps(nn.Linear(8, 8).cuda(), torch.randn(2, 8, device="cuda"))


def test_a_profiler_of_the_gpu_watches_nothing():
    assert foresee(is_profiled, 1).step_seconds > 0


def compiles_an_optimizer():
    torch.jit.script(importlib.import_module("torch.optim.adadelta").adadelta)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_functions_of_optimizers_are_compiled_as_without_a_recording():
    """The import of torch.distributed.optim does so: a script that used ZeroRedundancyOptimizer ended in an error."""
    foresee(compiles_an_optimizer, 1)


def has_sparse_gradients():
    steps(nn.Embedding(10, 8, sparse=True).cuda(), torch.randint(0, 10, (4,), device="cuda"))


def makes_sparse_tensors():
    torch.randn(4, 4, device="cuda").to_sparse()


def makes_compressed_tensors():
    torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2), device="cuda")


@pytest.mark.parametrize("program", [has_sparse_gradients, makes_sparse_tensors, makes_compressed_tensors])
def test_sparse_tensors_are_refused_by_one_line(program):
    with pytest.raises(UnsupportedOp, match=r"^a sparse tensor at .*test_idioms.py:\d+ is not foreseen.*dense tensors"):
        foresee(program, 1)


@torch.library.custom_op("foreseen::gathered", mutates_args=())
def gathered(x: torch.Tensor, fails: bool) -> torch.Tensor:
    """Gathers rows of all ranks, as operators of context parallelism do."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    if fails:
        raise RuntimeError("there is no GPU for a kernel of Triton")
    return torch.cat(parts)


@torch.library.custom_op("foreseen::added", mutates_args=())
def added(x: torch.Tensor) -> torch.Tensor:
    return add_up(x)


def add_up(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


@gathered.register_fake
def of_all(x, _):
    return x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])


added.register_fake(torch.empty_like)
gathered.register_autograd(lambda _, grad: (added(grad).chunk(2)[0], None))


@pytest.mark.parametrize("fails", [False, True])
def test_operators_of_the_program_communicate_as_their_code_says(fails):
    """Their fake implementation only makes results, so it took the place of the collectives."""

    def program():
        device = programs.begin()
        gathered(torch.ones(4, 8, device=device, requires_grad=True), fails).sum().backward()

    seen = foresee(program, 2)
    found = [(each.kind, each.num_bytes) for each in seen.traces[0].entries if isinstance(each, Collective)]
    assert found == [("all_gather", 2 * 4 * 8 * 4), ("all_reduce", 2 * 4 * 8 * 4)]
    words = "communication of foreseen::gathered counts up to a RuntimeError, as its code cannot run with fake tensors"
    assert any(each.startswith(words) for each in seen.assumptions) == fails


def test_a_newer_flash_attention_need_not_be_installed():
    def program():
        activate_flash_attention_impl("FA3")
        return current_flash_attention_impl()

    seen = foresee(program, 1)
    assert seen.assumptions[1].startswith("flash attention of version 3 or 4 takes the time of version 2")
    assert current_flash_attention_impl() is None


class WithNames(nn.Module):
    """Wrapper that has attributes of its own by names of `nn.Module`, as Megatron's DDP has."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(8, 8)
        self.buffers, self.parameters_of = [], list(self.parameters())
        self.parameters = self.modules = None

    def forward(self, x):
        return self.module(x.cuda())


def test_a_module_may_give_other_values_to_names_of_modules():
    def program():
        model = WithNames().cuda()
        optimizer = torch.optim.SGD(model.parameters_of)
        for _ in range(2):
            for _ in range(3):
                model(torch.ones(2, 8)).sum().backward()
            optimizer.step()

    seen = foresee(program, 1)
    assert sum(each.flops for each in seen.traces[0].entries if isinstance(each, Kernel)) == 3 * 2 * 2 * 2 * 8 * 8
