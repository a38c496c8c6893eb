"""`echelon.foresee`, from a program to figures."""

import datetime
import importlib
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import echelon
from echelon import InvalidArgument, InvalidWorldSize, LaunchError
from echelon.cli import main as command
from echelon.cli.foresee import ForeseeOptions
from echelon.cli.foresee import foresee as foresee_command
from echelon.foresight.play.devices import device_named
from tests.foresight import programs

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore::UserWarning:torch")


def test_figures_of_a_step():
    seen = echelon.foresee(lambda: programs.ddp(depth=1), 16, gpu="a100", hosts=2, network="infiniband-200g")
    assert seen.world_size == len(seen.peak_memory) == len(seen.live_memory) == 16
    assert set(seen.classes) == {0}
    assert seen.step_seconds > 0
    assert seen.tokens_per_second(1000) == 1000 / seen.step_seconds
    for tokens in (-1, "many", float("nan")):
        with pytest.raises(InvalidArgument, match="tokens="):
            seen.tokens_per_second(tokens)
    assert 0 < seen.mfu < 1
    assert seen.peak_memory[5] >= seen.live_memory[5] > 0
    assert seen.fits
    assert seen.problems == []
    (name,) = seen.exposed
    assert name.place.startswith("tests/foresight/programs.py:")
    with pytest.raises(InvalidArgument, match="num_ranks is no argument here: foresee the program again with that"):
        seen.on(num_ranks=8)
    other = seen.on(gpu="h100", hosts=4)
    assert other.mfu < seen.mfu  # as short, since the host takes as long
    assert other.cluster.hosts == (4, 4, 4, 4)
    assert other.live_memory == seen.live_memory
    assert "16 x a100 on 2 hosts, 1 role" in str(seen)
    assert "network                infiniband-200g, a NIC for each GPU" in str(seen)
    assert seen.timeline.starts


def gathered():
    """All ranks reduce one large tensor, with nothing beside it."""
    device = programs.begin()
    weight = torch.nn.Parameter(torch.ones(1 << 26, device=device))
    optimizer = torch.optim.SGD([weight])
    while True:
        weight.grad = torch.ones_like(weight)
        dist.all_reduce(weight.grad)
        optimizer.step()


def test_narrow_uplinks_lengthen_a_step_between_hosts():
    wide = echelon.foresee(gathered, 16, hosts=2)
    narrow = echelon.foresee(gathered, 16, hosts=2, oversubscription=4.0, rails=8)
    assert narrow.step_seconds > 1.5 * wide.step_seconds
    assert wide.on(oversubscription=4.0, rails=8).step_seconds == narrow.step_seconds
    plain = wide.on(network="100GbE")
    # One NIC for each host of eight ranks, as the report and docs/foresee.md say.
    ((_, own),), ((_, shared),) = (each.exposed.items() for each in (plain, plain.on(oversubscription=8)))
    assert shared == pytest.approx(8 * own, rel=0.05)
    assert narrow.on(network="infiniband-800g").cluster.oversubscription == 4.0
    with pytest.raises(LaunchError, match=r"oversubscription=0\.5"):
        wide.on(oversubscription=0.5)


def test_other_hardware_has_the_hosts_of_a_fresh_forecast():
    apart = echelon.foresee(gathered, 16, hosts=4)
    own = echelon.Network(latency=1e-5, bandwidth=1e9, hosts=(10, 6))
    assert apart.on(gpu="a100").cluster.hosts == (4, 4, 4, 4)
    assert apart.on(hosts=2).on(gpu="a100").cluster.hosts == (8, 8)
    fresh = echelon.foresee(gathered, 16)
    assert fresh.on(network=own).cluster == echelon.foresee(gathered, 16, network=own).cluster
    assert fresh.on(network=own).on(network="100GbE").cluster.hosts == (8, 8)


def uneven():
    """Three rows on two ranks: the last rank has one row less."""
    device = programs.begin()
    rows = 2 - dist.get_rank() // 2
    model = torch.nn.Linear(512, 512, bias=False).to(device)
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.ones(rows, 512, device=device)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()


def in_mesh():
    """All ranks are one dimension of a mesh, for which torch takes the default group."""
    device = programs.begin()
    mesh = init_device_mesh("cuda", (1, dist.get_world_size()), mesh_dim_names=("tp", "dp"))
    pair = dist.new_group([0, 1])
    weight = distribute_tensor(torch.ones(64, 64, device=device), mesh["dp"], [Replicate()])
    # torch warns that meshes of processors do not have this, and that groups of other kinds have no timeout.
    torch.distributed.tensor._random.manual_seed(3, mesh)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=9))
    torch.nn.init.normal_(weight)
    optimizer = torch.optim.SGD([weight.to_local().requires_grad_()])
    while True:
        weight.grad = weight.to_local().clone()
        dist.all_reduce(weight.grad, group=mesh["dp"].get_group())
        if dist.get_rank() < 2:
            dist.all_reduce(weight.grad, group=pair)
        optimizer.step()


def test_groups_have_the_name_of_their_mesh_dimension_or_their_ranks():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "DTensor|Set timeout")
        seen = echelon.foresee(in_mesh, 4)
    assert {name.group for name in seen.exposed} == {"dp", "ranks 0, 1"}


def test_ranks_that_differ_are_roles():
    assert echelon.foresee(uneven, 4).classes == (0, 0, 2, 2)


def too_large():
    model = torch.nn.Linear(65536, 65536, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        model(torch.ones(1, 65536, device="cuda")).sum().backward()
        optimizer.step()


def test_too_little_memory_is_a_problem_with_lines():
    seen = echelon.foresee(too_large, 1, gpu="a100-40g")
    (problem,) = seen.problems
    assert not seen.fits
    assert problem.kind == "out of memory"
    assert "test_foresee.py:" in problem.text
    assert seen.live_memory[0] >= 4 * 4 * 65536**2
    assert "39.4. Shard parameters and optimizer state over more ranks. The largest tensors then:\n" in problem.text
    # One line for each, without the tiny ones: the batch and its result.
    sizes = [line.split()[0] for line in problem.text.splitlines()[1:]]
    assert sizes == ["32.00", "16.00", "16.00", "16.00"]


def adds(backend, choose):
    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(8, device=choose()))


def unnumbered():
    return "cuda"


def assumed(*args, **kwargs):
    seen = echelon.foresee(adds, *args, **kwargs)
    return [each.partition(" at ")[0] for each in seen.assumptions if "no optimizer" not in each]


def named_by_rank():
    return f"cuda:{dist.get_rank()}"


def set_by_rank_of_host():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return "cuda"


def set_by_rank():
    torch.cuda.set_device(dist.get_rank())
    return "cuda"


def moved_by_rank():
    return torch.ones(1).cuda(dist.get_rank()).device


def counted_by_rank():
    return torch.device(dist.get_rank())


def test_hosts_of_other_sizes_have_as_many_gpus_as_ranks():
    """All had as many as the first one, so that the last rank of a larger host had no GPU."""

    def program():
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(8, device="cuda"))
        found.append((torch.cuda.device_count(), torch.accelerator.device_count(), local + 1))

    found = []
    echelon.foresee(program, 5, hosts=[2, 3])
    assert found == [(2, 2, 1), (2, 2, 2), (3, 3, 1), (3, 3, 2), (3, 3, 3)]


@pytest.mark.parametrize("choose", [named_by_rank, set_by_rank, moved_by_rank, counted_by_rank])
def test_a_gpu_that_a_host_has_not_is_refused(choose):
    assert not assumed(4, ("nccl", choose))
    with pytest.raises(RuntimeError, match=r"cuda:2 is no GPU: its host has 2 GPUs, from cuda:0 on; .*LOCAL_RANK"):
        echelon.foresee(adds, 4, ("nccl", choose), hosts=2)


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("gloo", ["communication of backend 'gloo' takes the time of 'nccl'"]),
        ("cuda:gloo,cpu:gloo", ["communication of backend 'gloo' takes the time of 'nccl'"]),
        ("cpu:gloo,cuda:nccl", []),
    ],
)
def test_a_backend_that_is_not_modelled_is_an_assumption(backend, text):
    assert assumed(2, (backend, set_by_rank)) == text


def alone_in_sight():
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    return "cuda"


def test_ranks_without_a_gpu_of_their_own_are_an_assumption():
    (text,) = assumed(2, ("cpu:gloo,cuda:nccl", alone_in_sight))
    assert text == "each rank has a GPU of its own, though it names none: torch.cuda.set_device(LOCAL_RANK) does"
    assert not assumed(2, ("nccl", unnumbered), hosts=2)


def number_zero():
    return torch.device("cuda", 0)


def of_group():
    """Returns the device in a program that binds its group to the rank's GPU, see `adds`."""
    dist.new_group(device_id=torch.device(f"cuda:{os.environ['LOCAL_RANK']}"))
    return "cuda"


def in_mesh_of_gpus():
    init_device_mesh("cuda", (dist.get_world_size(),))
    return "cuda"


def mesh_after_gpu():
    torch.ones(1, device="cuda")
    return in_mesh_of_gpus()


def reversed_numbers():
    return f"cuda:{3 - dist.get_rank() % 4}"


def replicated_by_number():
    rank = int(os.environ["LOCAL_RANK"])
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[rank])
    return "cuda"


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", None])
@pytest.mark.parametrize("choose", [unnumbered, number_zero])
def test_ranks_of_a_host_that_share_a_gpu_are_an_error_with_the_line(choose, backend):
    text = r"use cuda:0, those of LOCAL_RANK 0 and [1-3] at .*test_foresee\.py:\d+, .*set_device\(LOCAL_RANK\)"
    with pytest.raises(RuntimeError, match=text):
        echelon.foresee(adds, 8, (backend, choose), hosts=2)


RIGHT = [set_by_rank_of_host, alone_in_sight, of_group, in_mesh_of_gpus, mesh_after_gpu, reversed_numbers]


@pytest.mark.parametrize("choose", [*RIGHT, replicated_by_number])
def test_ranks_with_gpus_of_their_own_share_none(choose):
    assert echelon.foresee(adds, 8, ("nccl", choose), hosts=2).problems == []


@pytest.mark.parametrize("choose", [unnumbered, number_zero])
def test_ranks_may_share_a_gpu_without_nccl_or_alone_on_their_host(choose):
    assert echelon.foresee(adds, 8, ("gloo", choose), hosts=2).problems == []
    assert echelon.foresee(adds, 4, ("nccl", choose), hosts=4).problems == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"world_size": 0}, InvalidWorldSize),
        ({"gpu": "h1000"}, LaunchError),
        ({"network": "string"}, LaunchError),
        ({"hosts": 3}, LaunchError),
        ({"steps": 0}, LaunchError),
        ({"args": (1,)}, LaunchError),
        ({"hosts": [4, 8]}, LaunchError),
        ({"hosts": -1}, LaunchError),
        ({"gpu": ""}, LaunchError),
        ({"network": ""}, LaunchError),
        ({"seed": None}, LaunchError),  # would differ from run to run
        ({"seed": "1"}, LaunchError),
        ({"allow_writes": "no"}, LaunchError),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(options, error):
    def main():
        raise AssertionError("ran")

    with pytest.raises(error):
        echelon.foresee(main, **{"world_size": 8, **options})


def test_a_device_of_ones_own_is_taken():
    device = device_named("a100")
    assert echelon.foresee(too_large, 1, gpu=device).device is device


def test_the_function_stays_one_after_all_modules_are_imported():
    for module in pkgutil.walk_packages(echelon.__path__, "echelon."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert callable(echelon.foresee)


SCRIPT = """
import atexit, os, sys, torch, torch.distributed as dist

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
atexit.register(print, "exit", rank)
try:
    while True:
        model(torch.ones(8, 256, device="cuda")).sum().backward()
        if "wrong" in sys.argv and rank == 1:
            dist.barrier()
        optimizer.step()
        if "large" in sys.argv:
            kept = torch.empty(1 << 38, dtype=torch.uint8, device="cuda")
finally:
    torch.save(model.state_dict(), "model.pt")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def run(*words, capsys):
    status = command(["foresee", "-n", "2", *words])
    return status, capsys.readouterr()


def test_command(script, capfd, monkeypatch):
    (script.parent / "loaded_before.py").write_text("from os import remove\n")
    monkeypatch.syspath_prepend(script.parent)
    before = importlib.import_module("loaded_before")  # each rank has a module of its own in its place
    monkeypatch.setitem(sys.modules, "loaded_before", before)
    status, shown = run("--gpu", "a100", "--hosts", "1x2", "--json", "--html", "report.html", "train.py", capsys=capfd)
    assert status == 0, shown.err
    assert {"[0] exit 0", "[1] exit 1"} <= set(shown.err.splitlines())
    found = json.loads(shown.out)
    assert found["step_seconds"] > 0
    assert (found["status"], found["files"]) == ("finished", ["report.html"])
    assert found["hosts"] == [2]
    assert found["skipped"] == ["torch.save at train.py:19"]
    assert not (script.parent / "model.pt").exists()
    page = (script.parent / "report.html").read_text()
    assert "<h1>train.py</h1>" in page
    assert "<h2>Skipped</h2><ul><li>torch.save at train.py:19</li></ul>" in page
    assert before.remove is os.remove


def test_an_unknown_gpu_is_refused_with_the_options(script):
    # Before torch is imported, which takes ten seconds on a busy machine.
    with pytest.raises(LaunchError, match="gpu='v100': use one of a100,"):
        ForeseeOptions("train.py", num_ranks=1, gpu="v100").check()
    ForeseeOptions("train.py", num_ranks=1, gpu="H200").check()
    with pytest.raises(LaunchError, match=r"gpu='mine\.json': No such file"):
        ForeseeOptions("train.py", num_ranks=1, gpu="mine.json").check()


def test_a_single_rank_is_foreseen_in_the_singular(script, monkeypatch):
    shown = []
    monkeypatch.setattr(sys.modules[ForeseeOptions.__module__], "working", lambda what, **_: shown.append(what))
    with pytest.raises(TypeError):  # no context manager: the command ends here
        foresee_command(ForeseeOptions("train.py", num_ranks=1))
    assert shown == ["foreseeing 1 rank"]


def test_a_failure_is_json_too(script, capfd):
    status, shown = run("--json", "train.py", "wrong", capsys=capfd)
    found = json.loads(shown.out)
    assert (status, found["status"], found["error_type"]) == (1, "failed", "CollectiveMismatch")
    assert found["error"] in shown.err


def test_command_fails_for_a_mistake(script, capfd):
    status, shown = run("train.py", "wrong", capsys=capfd)
    assert status == 1
    assert "CollectiveMismatch" in shown.err
    assert "train.py:14" in shown.err


def test_command_says_that_a_script_does_not_fit(script, capfd):
    status, shown = run("train.py", "large", "--batch", "8", capsys=capfd)
    assert status == 1
    assert "DOES NOT FIT" in shown.out
    assert {"[0] exit 0", "[1] exit 1"} <= set(shown.out.splitlines())
    note = "lines after a rank, such as [0], are the script's own: their times and values are of fake tensors"
    assert f"echelon: {note}\n" in shown.err
    assert 'foresee smaller batches by --sweep "--batch {2,1}"' in shown.err


BLOCKS = """
import argparse, torch
from torch.utils.checkpoint import checkpoint
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--recompute", action="store_true")
options = parser.parse_args()
parts = (torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
blocks = [torch.nn.Sequential(*parts).cuda() for _ in range(8)]
optimizer = torch.optim.SGD(blocks[0].parameters(), lr=0.1)
while True:
    x = torch.ones(options.batch * 65536, 1024, device="cuda")
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if options.recompute else block(x)
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sweeps_that_are_advised_after_a_misfit_fit_and_are_not_needlessly_small(tmp_path, monkeypatch, capfd):
    """A sweep over {3,1} was advised where 4 fitted, and activation checkpointing was left out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BLOCKS)
    gpu = "foresee", "-n", "1", "--gpu", "a100-40g"
    assert command([*gpu, "train.py", "--batch", "9"]) == 1
    sweeps = re.findall('--sweep "([^"]+)"', capfd.readouterr().err)
    assert sweeps == ["--batch {3,2,1}", "--recompute --batch {9,6,4}"]
    largest = []
    for sweep in sweeps:
        assert command([*gpu, "--json", "--sweep", sweep, "train.py"]) == 0
        ranked = json.loads(capfd.readouterr().out)["ranked"]
        largest.append(max(int(each["arguments"][-1]) for each in ranked if each["memory"]["fits"]))
    assert command([*gpu, "train.py", "--batch", "9", "--recompute"]) == 1
    assert "activation checkpointing by" not in capfd.readouterr().err, "the script recomputes already"
    assert largest == [3, 6]  # of 39 GiB: 4 need 49, and 9 with recomputation 47


@pytest.mark.timeout(120)
def test_command_that_sigterm_ends_leaves_no_folder(tmp_path):
    for_scratch = tmp_path / "scratch"
    for_scratch.mkdir()
    (tmp_path / "train.py").write_text("import time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(0.01)\n")
    words = [sys.executable, "-P", "-m", "echelon", "foresee", "-n", "2", "train.py"]
    environment = {**os.environ, "TMPDIR": str(for_scratch)}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "[0] begun\n"
        assert list(for_scratch.glob("echelon-foresee-*"))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    # On a busy machine a line says how long it has taken so far.
    assert (process.returncode, errors.splitlines()[-1]) == (143, "echelon: ended by SIGTERM")
    assert not list(for_scratch.iterdir())


def test_command_says_that_nothing_was_recorded(script, capfd):
    script.write_text("import os\nprint(os.environ['RANK'])\n")
    status, shown = run("train.py", capsys=capfd)
    assert status == 1
    assert "0.0 us" not in shown.out
    assert shown.err.startswith("echelon: train.py has nothing to foresee: no operator of torch, no collective and no")


def test_command_refuses_a_wrong_option(script, capfd):
    assert run("--gpu", "h1000", "train.py", capsys=capfd)[0] == 2
    assert run("--hosts", "many", "train.py", capsys=capfd)[0] == 2
    assert "--hosts 2x4 is for 8 ranks, not for " in run("--hosts", "2x4", "train.py", capsys=capfd)[1].err
    for words in (["--json"], ["--png", "a.png"], ["--sweep", "--tp {1,2}"], ["--allow-writes"], ["-n", "2"]):
        told = command(["foresee", "--calibrate", "here.json", *words]), capfd.readouterr().err
        line = f"echelon: {words[0]} with --calibrate: it takes --gpu alone; leave {words[0]} out\n"
        assert told == (2, line)
    assert run("--calibrate", "here.json", "train.py", capsys=capfd)[0] == 2
    assert run("--calibrate", "here.txt", capsys=capfd)[0] == 2
    assert run("--calibrate", "missing/here.json", capsys=capfd)[0] == 2
    assert run(capsys=capfd)[0] == 2
    assert run("--tokens", "-1", "train.py", capsys=capfd)[0] == 2


def layers_of_one_line():
    """Four layers that keep one product each, made at one line, and a head of its own."""
    torch.manual_seed(0)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64, 64, device="cuda"))

        def forward(self, x):
            return torch.relu(x @ self.weight)

    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.ones(1 << 16, 64, device="cuda", requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_largest_tensors_of_alike_layers_are_one_entry():
    seen = echelon.foresee(layers_of_one_line, 1, gpu="a100")
    largest = seen.largest_at_peak(0)
    (name, size), *_ = [(name, size) for name, size in largest if "activations" in name and "modules" in name]
    # At the peak, backward of the last layer has freed its own.
    assert name.endswith(" in 3 modules *")
    assert size == 3 * (1 << 16) * 64 * 4
    assert sum(size for _, size in largest) == seen.memory[0].live_peak
