"""State that torch and Python keep once per process belongs to each simulated rank, and is as before afterwards."""

import ctypes
import os
import socket
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrize

import echelon
from echelon.errors import UnsupportedOp
from echelon.simulation.process import pools
from echelon.simulation.process.library_state import SETTINGS, SHARED_SETTINGS, LibraryAttribute, LibraryState


def settings():
    return [setting.get() for setting in SETTINGS]


def test_each_rank_has_its_settings_of_torch():
    def program(group):
        is_odd = group.rank % 2 == 1
        torch.set_default_dtype(torch.float64 if is_odd else torch.float32)
        torch.use_deterministic_algorithms(is_odd, warn_only=is_odd)
        torch.set_float32_matmul_precision("high" if is_odd else "highest")
        torch.backends.cuda.enable_math_sdp(is_odd)
        torch.backends.mha.set_fastpath_enabled(is_odd)
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = is_odd
        torch.backends.cudnn.enabled = torch.backends.cudnn.allow_tf32 = is_odd
        torch.sparse.check_sparse_tensor_invariants.enable() if is_odd else None
        torch.__future__.set_swap_module_params_on_conversion(is_odd)
        torch.__future__.set_overwrite_module_params_on_conversion(is_odd)
        torch.multiprocessing.set_sharing_strategy("file_system" if is_odd else "file_descriptor")
        before = settings()
        group.barrier()
        return before == settings(), torch.ones(1).dtype, torch.are_deterministic_algorithms_enabled()

    before = settings()
    results = echelon.simulate(program, 4).results
    assert results == [(True, torch.float32, False), (True, torch.float64, True)] * 2
    assert settings() == before


def test_each_rank_has_its_settings_of_python():
    def program(group):
        sys.setrecursionlimit(2000 + group.rank)
        socket.setdefaulttimeout(5.0 + group.rank)
        group.barrier()
        return sys.getrecursionlimit(), socket.getdefaulttimeout()

    before = sys.getrecursionlimit(), socket.getdefaulttimeout()
    assert echelon.simulate(program, 3).results == [(2000, 5.0), (2001, 6.0), (2002, 7.0)]
    assert (sys.getrecursionlimit(), socket.getdefaulttimeout()) == before


def test_settings_that_ranks_share_are_noted_and_as_before_afterwards():
    def program():
        torch.backends.mkldnn.enabled = False
        torch.backends.mkldnn.deterministic = True
        torch.utils.deterministic.fill_uninitialized_memory = False

    before = [setting.get() for setting in SHARED_SETTINGS.values()]
    seen = echelon.simulate(program, 2)
    assert [setting.get() for setting in SHARED_SETTINGS.values()] == before
    assert [note.partition(":")[0] for note in seen.notes] == [
        "torch.backends.mkldnn.enabled was set to False",
        "torch.backends.mkldnn.deterministic was set to True",
        "torch.utils.deterministic.fill_uninitialized_memory was set to False",
    ]
    assert echelon.simulate(lambda: None, 2).notes == ()


def precisions():
    backends = torch.backends
    places = (backends, backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)
    return [place.fp32_precision for place in places]


def test_each_rank_has_its_precisions_of_backends():
    """torch refuses to tell `get_float32_matmul_precision` once a program has set that of a backend."""

    def program(group):
        if group.rank == 1:
            torch.backends.fp32_precision = "tf32"
            torch.backends.cuda.matmul.fp32_precision = "ieee"
        elif group.rank == 2:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        before = precisions()
        group.barrier()
        told = group.rank != 0 or torch.get_float32_matmul_precision()
        return told, before == precisions(), before

    before, told = precisions(), torch.get_float32_matmul_precision()
    (first, same, of_first), *others = echelon.simulate(program, 3).results
    assert (first, same, of_first) == (told, True, before)
    assert [rank[:2] for rank in others] == [(True, True)] * 2
    assert others[0][2][:3] == ["tf32", "tf32", "ieee"]
    assert others[1][2][-1] == "bf16"
    assert (precisions(), torch.get_float32_matmul_precision()) == (before, told)


def test_each_rank_prints_tensors_by_its_own_options():
    def program(group):
        torch.set_printoptions(precision=group.rank + 1)
        group.barrier()
        return str(torch.tensor(1 / 3))

    assert echelon.simulate(program, 3).results == ["tensor(0.3)", "tensor(0.33)", "tensor(0.333)"]
    assert str(torch.tensor(1 / 3)) == "tensor(0.3333)"


def test_a_rank_that_caches_parametrized_weights_does_so_for_itself_alone():
    def program(group):
        layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
        with parametrize.cached() if group.rank == 0 else nullcontext():
            group.barrier()
            first = layer.weight
            group.barrier()
            is_cached = layer.weight is first
            group.barrier()
        return is_cached

    assert echelon.simulate(program, 2).results == [True, False]


def test_a_rank_that_leaves_autocast_drops_no_casts_of_another_one():
    def twice(weight):
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.ones(2, 64) @ weight
            if dist.get_rank() == 0:
                dist.barrier()  # rank 1 leaves autocast meanwhile, changes its weight and enters again
            y = y @ weight
        y.float().square().sum().backward()  # through one cast of the weight, or two, which rounds differently
        return weight.grad

    def program():
        dist.init_process_group("gloo")
        weight = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
        gradient = twice(weight)
        if dist.get_rank() == 0:
            return gradient, torch.is_autocast_cache_enabled()
        weight.data.mul_(2.0)
        weight.grad = None
        second = twice(weight)
        dist.barrier()
        return gradient, second, torch.is_autocast_cache_enabled()

    (first, _), (same, second, is_enabled) = echelon.simulate(program, 2).results
    assert torch.equal(first, same)
    assert is_enabled
    torch.testing.assert_close(second, 8 * same, rtol=0.1, atol=100.0)


def test_filters_of_warnings_belong_to_the_rank_that_sets_them():
    def program(group):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if group.rank else "error")
            group.barrier()  # ranks leave in another order than they have entered
            action = warnings.filters[0][0]
            group.barrier()
            if group.rank == 0:
                group.barrier()
        if group.rank:
            group.barrier()
        return action

    before = list(warnings.filters)
    assert echelon.simulate(program, 3).results == ["error", "ignore", "ignore"]
    assert warnings.filters == before


def test_warnings_are_recorded_by_the_rank_that_asks_for_them():
    def program(group):
        if group.rank == 1:
            group.recv(0)
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            if group.rank == 0:
                group.send(torch.ones(1), 1)  # the other one enters its block now
                group.recv(1)
            else:
                group.send(torch.ones(1), 0)
                group.recv(0)  # the other one has left its block
                warnings.warn("told", stacklevel=1)
        if group.rank == 0:
            group.send(torch.ones(1), 1)
        return [str(each.message) for each in recorded]

    before = warnings.showwarning
    assert echelon.simulate(program, 2).results == [[], ["told"]]
    assert warnings.showwarning is before


# torch keeps a plan under the mesh, which is equal on all ranks, and the plan has the place of the rank that made it.
@pytest.mark.filterwarnings("ignore")  # of torch, about its own names
def test_each_rank_plans_its_own_redistribution_of_a_dtensor():
    def program():
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(9.0)
        parts = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
        found = parts.to_local().tolist(), parts.full_tensor().tolist()
        dist.destroy_process_group()
        return found

    results = echelon.simulate(program, 4).results
    assert [local for local, _ in results] == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    assert [full for _, full in results] == [list(range(9))] * 4


def test_hooks_of_all_modules_belong_to_the_rank_that_adds_them():
    def program(group):
        calls = []
        if group.rank == 1:
            torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(group.rank))
        group.barrier()
        torch.nn.Identity()(torch.ones(1))
        group.barrier()
        return calls

    assert echelon.simulate(program, 3).results == [[], [1], []]
    assert not torch.nn.modules.module._global_forward_hooks


def test_an_attribute_of_a_library_begins_anew_on_each_rank(monkeypatch):
    library = ModuleType("library_with_state")
    library.Shared = type("Shared", (), {"names": ["outside"]})
    monkeypatch.setitem(sys.modules, library.__name__, library)
    state = LibraryState([LibraryAttribute(library.__name__, "Shared.names", list)])
    outside = state.take()
    state.put(state.first(0))
    library.Shared.names.append("of rank 0")
    first = state.take()
    state.put(state.first(1))
    assert library.Shared.names == []
    state.put(first)
    assert library.Shared.names == ["of rank 0"]
    state.put(outside)
    assert library.Shared.names == ["outside"]


def save(process_kind):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    def program(group):
        dist.init_process_group("gloo")
        kind = AsyncCheckpointerType[process_kind]
        dcp.async_save({"a": torch.ones(1)}, checkpoint_id="never written", async_checkpointer_type=kind).result()

    return program


@pytest.mark.filterwarnings("ignore")  # of torch, about its own names
def test_a_checkpoint_by_processes_is_refused():
    with pytest.raises(UnsupportedOp, match=r"starts a process for each rank.*use AsyncCheckpointerType.THREAD"):
        echelon.simulate(save("PROCESS"), 2)


# torch keeps plans of saves in dicts of a class, under the name of the planner's class.
@pytest.mark.filterwarnings("ignore")  # of torch, about its own names
def test_each_rank_keeps_its_own_plans_of_checkpoints(tmp_path):
    import torch.distributed.checkpoint as dcp

    def program(group):
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        for step in range(2):
            state = {"a": distribute_tensor(torch.arange(4.0) + step, mesh, [Shard(0)])}
            dcp.save(
                state, checkpoint_id=tmp_path / str(step), planner=dcp.DefaultSavePlanner(enable_plan_caching=True)
            )
        read = {"a": torch.zeros(4)}
        dcp.load(read, checkpoint_id=tmp_path / "1")
        dist.destroy_process_group()
        return read["a"].tolist()

    assert echelon.simulate(program, 2).results == [[1, 2, 3, 4]] * 2


# A second session began, and its end was a segmentation fault.
@pytest.mark.parametrize("at_once", [True, False])
def test_two_ranks_cannot_use_the_profiler_at_once(at_once):
    def program(group):
        if group.rank and not at_once:
            group.barrier()
        with torch.autograd.profiler.profile() as profiler:
            torch.ones(1)
            if at_once:
                group.barrier()
        if not group.rank and not at_once:
            group.barrier()
        return any(event.name == "aten::ones" for event in profiler.function_events)

    if at_once:
        with pytest.raises(UnsupportedOp, match=r"profiler on rank \d, while rank \d uses it.*profile a single rank"):
            echelon.simulate(program, 2)
    else:
        assert echelon.simulate(program, 2).results == [True, True]


def communicate(group):
    return group.all_reduce(torch.ones(1)).item()


@pytest.fixture
def communicates(monkeypatch):
    monkeypatch.setattr(pools, "COMMUNICATING", frozenset({__name__}))


def test_a_job_that_communicates_takes_turns(communicates):
    def program(group):
        with ThreadPoolExecutor(1) as pool:
            futures = [pool.submit(communicate, group) for _ in range(2)]
            while not futures[1].done():
                pass
            return [future.result() for future in futures], futures[0].exception()

    assert echelon.simulate(program, 4).results == [([4.0, 4.0], None)] * 4


def receive(group):
    return group.recv(1 - group.rank).item()


def test_a_wait_for_such_a_job_can_time_out(communicates):
    def program(group):
        if group.rank == 1:
            group.recv(0)
            return group.send(torch.ones(1), 0)
        future = ThreadPoolExecutor(1).submit(receive, group)
        with pytest.raises(TimeoutError):
            future.result(timeout=0.5)
        group.send(torch.ones(1), 1)
        return future.result()

    assert echelon.simulate(program, 2).results[0] == 1.0


def test_jobs_that_do_not_communicate_keep_their_threads():
    def program(group):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: group.rank * 2).result()

    assert echelon.simulate(program, 2).results == [0, 2]


def test_c_code_sees_the_environment_from_before_afterwards(monkeypatch):
    monkeypatch.setenv("ECHELON_KEPT", "before")
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p

    def program(group):
        os.environ["ECHELON_KEPT"] = os.environ["ECHELON_MADE"] = str(group.rank)
        group.barrier()
        return os.environ["ECHELON_KEPT"], getenv(b"ECHELON_KEPT") != b"before"

    assert echelon.simulate(program, 3).results == [(str(rank), True) for rank in range(3)]
    assert getenv(b"ECHELON_KEPT") == b"before"
    assert getenv(b"ECHELON_MADE") is None


IMPORTED_BY_RANKS = """
import sys, types, echelon

def program():
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.manual_seed(0)
    data = torch.randn(2, 4)
    models = [fully_shard(torch.nn.Linear(4, 4))]
    models.append(FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=data.device))
    for model in models:
        model(data).sum().backward()
    whole = distribute_tensor(data, init_device_mesh("cpu", (2,)), [Shard(0)]).full_tensor()
    assert torch.equal(whole, data)
    return [model(data).tolist() for model in models]

def of_echelon():
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if not name.startswith("echelon") else ():
            for each in (value, *vars(value).values()) if isinstance(value, type) else (value,):
                if isinstance(each, types.FunctionType) and "/src/echelon/" in each.__code__.co_filename:
                    yield name, attribute

first, second = echelon.simulate(program, 2), echelon.simulate(program, 2)
assert first.results == second.results
assert first.results[0] == first.results[1]
left = [each for each in of_echelon() if each[0] != "__main__"]
assert not left, left
"""


def test_ranks_may_be_the_first_to_import_fsdp_and_dtensor():
    """In a new interpreter. A module that names a function which a simulation replaces would keep the replacement."""
    code = [sys.executable, "-W", "ignore", "-c", IMPORTED_BY_RANKS]
    ended = subprocess.run(code, capture_output=True, text=True, check=False, timeout=50)
    assert ended.returncode == 0, ended.stderr
