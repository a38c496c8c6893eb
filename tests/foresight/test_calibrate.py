"""A device measured on this machine: its file, its times, and programs foreseen on it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.errors import LaunchError
from echelon.foresight.calibrate import calibrate, line
from echelon.foresight.calibration_file import load, save
from echelon.foresight.play.devices import DEVICES
from echelon.foresight.trace import Kernel

CURVES = {
    "add": ((1000.0, 1e-6), (100_000.0, 100e-6)),
    "gelu": ((1000.0, 3e-6), (1e6, 3e-3)),
    "matmul_m": ((1.0, 4e-9), (100.0, 1e-9)),
    "matmul_n": ((1.0, 8e-9), (100.0, 2e-9)),
    "matmul_k": ((1.0, 8e-9), (100.0, 2e-9)),
    "attention": ((1e6, 1e-3), (1e8, 1e-1)),
    "attention_backward": ((1e6, 2e-3), (1e8, 2e-1)),
}
MEASURED = replace(DEVICES["cpu"], curves=CURVES, cores=2, launch_seconds=1e-6, networks={"shared-memory": (1e-5, 1e9)})


def kernel(name, kind="other", moved=0, flops=0, shape=()):
    return Kernel(0, name, kind, flops, "float32", shape, ((1, moved),), (), 1, "forward", -1, -1)


@pytest.mark.parametrize(
    ("each", "seconds"),
    [
        (kernel("add", moved=1000), 1e-6),
        (kernel("add", moved=10_000), 10e-6),  # between two points, by their exponent
        (kernel("add", moved=1_000_000), 1e-3),  # beyond the last one
        (kernel("add", moved=10), 1e-6),  # before the first one: a call's own time
        (kernel("erfc", moved=1000), 1e-6),  # an operator that was not measured
        (kernel("gelu", moved=1000), 3e-6),
        (kernel("mm", "matmul", flops=2_000_000, shape=(1, 100, 100, 100)), 2e-3),
        (kernel("mm", "matmul", flops=20_000, shape=(1, 100, 1, 100)), 160e-6),
        (kernel("flash", "attention", flops=10**7, shape=(1, 1, 64, 64, 8)), 1e-2),
        (kernel("flash_backward", "attention", flops=10**7, shape=(1, 1, 64, 64, 8)), 2e-2),
    ],
)
def test_times_lie_on_the_measured_curves(each, seconds):
    assert MEASURED.seconds(each) == pytest.approx(seconds, rel=1e-6)


def test_a_device_comes_back_from_its_file(tmp_path):
    save(MEASURED, tmp_path / "cpu.json")
    assert load(tmp_path / "cpu.json") == MEASURED


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9}', '{"format": 1, "name": "cpu"}', "[1]", "\udcff"])
def test_a_file_of_another_kind_is_refused_with_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(LaunchError, match=r"other.json.*make the file by echelon foresee --calibrate"):
        load(path)
    with pytest.raises(LaunchError, match=r"no\.json"):
        echelon.foresee(step, 1, gpu=str(tmp_path / "no.json"))


@pytest.mark.parametrize(
    "change",
    [
        {"curves": {**CURVES, "gelu": ((1000.0, 1e-6),)}},
        {"curves": {**CURVES, "gelu": ((1000.0, 1e-6), (1000.0, 2e-6))}},
        {"curves": {**CURVES, "add": ((1000.0, 1e-6), (2000.0, 0.0))}},
        {"curves": {name: curve for name, curve in CURVES.items() if name != "matmul_k"}},
        {"cores": 0},
        {"cores": "2"},
        {"machine": None},
        {"networks": {"loopback": (1e-5, -1e9)}},
        {"networks": {"loopback": (-1e-5, 1e9)}},
        {"links": {"loopback": {"all_reduce two": ((8.0, 1e-6), (16.0, 1e-6))}}},
    ],
)
def test_impossible_figures_in_a_file_are_refused(tmp_path, change):
    save(replace(MEASURED, **change), tmp_path / "cpu.json")
    with pytest.raises(LaunchError, match=r"make the file by echelon foresee --calibrate"):
        load(tmp_path / "cpu.json")


def step():
    dist.init_process_group("gloo")
    assert not torch.cuda.is_available()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("few_bytes", [1e-5, 1e-3, 2e-3])
def test_a_network_has_a_speed_if_few_bytes_took_as_long_as_many(few_bytes):
    """A machine that did other work meanwhile: the speed was negative, and the file could not be used."""
    latency, rate = line({"all_reduce 2": ((8.0, few_bytes), (1e4, 1e-3), (1e6, 1e-3))})
    assert latency + 1e6 / rate == pytest.approx(1e-3)
    assert 0 < latency <= 5e-4


def test_a_program_is_foreseen_on_processors_that_ranks_share(tmp_path):
    save(MEASURED, tmp_path / "cpu.json")
    two, four = (echelon.foresee(step, n, gpu=str(tmp_path / "cpu.json"), network="shared-memory") for n in (2, 4))
    names = {entry.name for entry in two.traces[0].entries if isinstance(entry, Kernel)}
    assert "addmm" in names
    assert not any(name.startswith("_foreach") for name in names), "as torch computes on the CPU by default"
    # Four ranks take the two processors for twice as long, and communicate.
    assert 2 < four.step_seconds / two.step_seconds < 4
    with pytest.raises(LaunchError, match="foresee it again"):
        two.on(gpu="h100")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_this_machine_can_be_measured():
    device = calibrate()
    assert device.cores >= 1
    assert all(y > 0 for curve in device.curves.values() for _, y in curve)
    assert all(a < b for curve in device.curves.values() for (a, _), (b, _) in pairwise(curve))
    assert device.launch_seconds < 1e-3
    assert set(device.networks) == {"shared-memory", "loopback"}
    assert echelon.foresee(step, 2, gpu=device, network="loopback").step_seconds > 0
