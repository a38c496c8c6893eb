"""Constants of a GPU, fitted to times that the model itself gives. The timing needs a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.errors import LaunchError
from echelon.foresight import calibrate_gpu
from echelon.foresight.calibrate_gpu import ATTENTIONS, PRODUCTS, Facts, Times, fitted
from echelon.foresight.calibration_file import load, save
from echelon.foresight.play.device import attention_seconds, matmul_seconds
from echelon.foresight.play.devices import DEVICES


def times_of(device, per_host):
    heads, head = 16, 128
    gathered = 1 << 28
    return Times(
        products={shape: matmul_seconds(device, "bfloat16", 1, *shape) for shape in PRODUCTS},
        attentions={n: attention_seconds(device, "bfloat16", 2 * heads * n * n * head, n, n, head) for n in ATTENTIONS},
        copy=(1 << 30) / (device.memory_bandwidth * device.memory_share),
        kernel=device.kernel_seconds,
        launch=device.launch_seconds,
        all_gather=gathered * (per_host - 1) / per_host / device.local_bandwidth if per_host > 1 else None,
    )


NAMES = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40g": "NVIDIA A100-SXM4-40GB",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per_host", [1, 8])
def test_the_constants_of_a_known_gpu_come_back(name, per_host):
    given = replace(DEVICES[name], matmul_share=0.55, attention_share=0.41, memory_share=0.7, launch_seconds=9e-6)
    given = replace(given, local_bandwidth=123e9 if per_host > 1 else given.local_bandwidth, kernel_seconds=3e-6)
    facts = Facts(NAMES[name], 80 << 30, given.num_sms, (9, 0), per_host)
    found = fitted(facts, times_of(given, per_host))
    assert found.peak == given.peak
    assert found.matmul_share == pytest.approx(0.55, rel=1e-3)
    assert found.attention_share == pytest.approx(0.41, rel=1e-3)
    assert found.memory_bandwidth * found.memory_share == pytest.approx(given.memory_bandwidth * 0.7)
    assert (found.kernel_seconds, found.launch_seconds) == (3e-6, 9e-6)
    assert found.local_bandwidth == pytest.approx(given.local_bandwidth)
    assert (found.name, found.memory_bytes, found.per_host) == (NAMES[name], 80 << 30, 8)


def test_an_unknown_gpu_has_the_peak_of_its_fastest_product():
    given = replace(DEVICES["h100"], peak={**DEVICES["h100"].peak, "bfloat16": 500e12})
    facts = Facts("NVIDIA H100 PCIe", 80 << 30, 114, (9, 0), 1)  # fewer multiprocessors than the table's
    times = times_of(given, 1)
    found = fitted(facts, times)
    assert found.peak["bfloat16"] == max(2 * m * n * k / seconds for (m, n, k), seconds in times.products.items())
    assert found.generation == "hopper"
    middle = sorted(matmul_seconds(found, "bfloat16", 1, *shape) / times.products[shape] for shape in PRODUCTS)[2]
    assert middle == pytest.approx(1, rel=1e-3)


def step():
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        model(torch.ones(4096, 4096, device="cuda")).sum().backward()
        optimizer.step()


def test_a_program_is_foreseen_by_the_file(tmp_path):
    facts = Facts(NAMES["h100"], 80 << 30, 132, (9, 0), 1)
    given = DEVICES["h100"].slowest(1)  # the table has the slowest of eight
    save(fitted(facts, times_of(given, 1)), tmp_path / "mine.json")
    seen, known = (echelon.foresee(step, 2, gpu=gpu) for gpu in (str(tmp_path / "mine.json"), "h100"))
    assert seen.step_seconds == pytest.approx(known.step_seconds, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [{"num_sms": 0}, {"matmul_share": 0.0}, {"memory_bandwidth": "fast"}, {"peak": {"bfloat16": 1.0}}, {"name": 3}],
)
def test_impossible_figures_in_a_file_are_refused(tmp_path, change):
    facts = Facts(NAMES["h100"], 80 << 30, 132, (9, 0), 1)
    save(replace(fitted(facts, times_of(DEVICES["h100"], 1)), **change), tmp_path / "mine.json")
    with pytest.raises(LaunchError, match=r"make the file by echelon foresee --calibrate"):
        load(tmp_path / "mine.json")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_this_gpu_can_be_measured():
    device = calibrate_gpu.calibrate_gpu()
    assert 0.2 < device.matmul_share < 1.2
    assert 0.05 < device.attention_share < 1.0
    assert 1e11 < device.memory_bandwidth < 2e13
    assert 2e-7 < device.kernel_seconds < 1e-4
