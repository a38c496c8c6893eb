"""Times of kernels, by hand: 10 multiprocessors, 1000 FLOP/s in bfloat16, 100 bytes per second, half of it attained."""

import math
import re
from dataclasses import replace

import pytest

from echelon.errors import LaunchError
from echelon.foresight.play.device import HALF_LENGTH, ROWS, SMALL_HEAD, attention_seconds, matmul_seconds
from echelon.foresight.play.devices import DEVICES, device_named
from echelon.foresight.trace import Kernel
from tests.helpers.traces import PLAIN

FAST_MEMORY = replace(PLAIN, memory_bandwidth=1e12)


def test_a_large_matrix_product_runs_at_the_share_of_the_peak():
    m, n, k = 2560, 1280, 4096
    assert matmul_seconds(FAST_MEMORY, "bfloat16", 1, m, n, k) == pytest.approx(2 * m * n * k / 1000)
    half = replace(FAST_MEMORY, matmul_share=0.5)
    assert matmul_seconds(half, "bfloat16", 1, m, n, k) == pytest.approx(2 * m * n * k / 500)
    assert matmul_seconds(FAST_MEMORY, "float32", 1, m, n, k) == pytest.approx(2 * m * n * k / 500)


def test_a_wave_with_one_tile_takes_as_long_as_a_full_one():
    # Ten tiles of 256 x 128 fill ten multiprocessors. An inner dimension below 512 is not split.
    full = matmul_seconds(FAST_MEMORY, "bfloat16", 1, 2560, 128, 256)
    more = matmul_seconds(FAST_MEMORY, "bfloat16", 1, 2561, 128, 256)
    assert full == pytest.approx(2 * 2560 * 128 * 256 / 1000)
    assert more > 1.05 * full


def test_few_tiles_are_split_along_the_inner_dimension():
    one_tile = 2 * 256 * 128 * 4096 / 100
    assert matmul_seconds(FAST_MEMORY, "bfloat16", 1, 256, 128, 4096) < one_tile / 5


def test_a_thin_matrix_product_is_bound_by_memory():
    moved = 2 * (1 * 4096 + 4096 * 4096 + 1 * 4096)
    slow_memory = replace(PLAIN, peak={"float32": 1e12, "bfloat16": 1e12})
    assert matmul_seconds(slow_memory, "bfloat16", 1, 1, 4096, 4096) == pytest.approx(moved / 100)


def test_each_tile_pays_for_its_start():
    device = replace(FAST_MEMORY, tile_seconds=7.0)
    plain = matmul_seconds(FAST_MEMORY, "bfloat16", 1, 2560, 1280, 4096)
    assert matmul_seconds(device, "bfloat16", 1, 2560, 1280, 4096) == pytest.approx(plain + 7 * 10)


def test_a_short_inner_dimension_costs_throughput():
    device = DEVICES["h100"]

    def throughput(k):
        return 2 * 8192 * 8192 * k / matmul_seconds(device, "bfloat16", 1, 8192, 8192, k)

    assert throughput(512) < 0.9 * throughput(8192)
    assert throughput(8192) < device.matmul_share * device.peak_of("bfloat16")


def test_a_batch_is_as_many_products():
    assert matmul_seconds(FAST_MEMORY, "bfloat16", 10, 256, 128, 256) == pytest.approx(10 * 2 * 256 * 128 * 256 / 1000)


def test_an_empty_matrix_product_takes_no_time():
    assert matmul_seconds(PLAIN, "bfloat16", 1, 0, 128, 128) == PLAIN.kernel_seconds


def test_attention_reaches_its_share_on_long_sequences():
    flops = 1e6
    long = attention_seconds(PLAIN, "bfloat16", flops, 1 << 20, 1 << 20, 128)
    assert long == pytest.approx(flops / (1000 * 0.5), rel=1e-3)
    assert attention_seconds(PLAIN, "bfloat16", flops, HALF_LENGTH, HALF_LENGTH, 128) == pytest.approx(
        flops / (1000 * 0.25)
    )
    assert attention_seconds(PLAIN, "bfloat16", flops, 8 * HALF_LENGTH, HALF_LENGTH, 64) == pytest.approx(
        flops / (1000 * 0.25 * SMALL_HEAD)
    )


def test_a_type_with_slower_products_lengthens_the_products_of_attention_alone():
    device = replace(PLAIN, peak={"float32": 100.0, "bfloat16": 1000.0})
    long, short = (
        attention_seconds(device, "float32", 1e6, keys, keys, 128)
        - attention_seconds(device, "bfloat16", 1e6, keys, keys, 128)
        for keys in (1 << 20, 64)
    )
    assert long == pytest.approx(short)
    half = replace(device, peak={"float32": 100.0, "float16": 1000.0})
    assert attention_seconds(half, "float16", 1e6, 64, 64, 128) == attention_seconds(
        device, "bfloat16", 1e6, 64, 64, 128
    )


def test_few_queries_of_attention_take_as_long_as_one_block_of_them():
    block, half = (attention_seconds(PLAIN, "bfloat16", rows * 1e6, rows, 4096, 128) for rows in (ROWS, ROWS // 2))
    assert block == pytest.approx(half)
    assert attention_seconds(PLAIN, "bfloat16", 1e6, ROWS, 1 << 20, 128) == pytest.approx(
        1e6 / (1000 * 0.5), rel=1e-3
    ), "long keys are read by all multiprocessors"


def kernel(name="add", kind="other", shape=(), moved=300, launches=1, flops=0):
    reads = ((1, moved - 100), (2, 50))
    return Kernel(0, name, kind, flops, "bfloat16", shape, reads, ((3, 50),), launches, "forward", -1, -1)


def test_other_kernels_are_as_fast_as_memory():
    assert PLAIN.seconds(kernel()) == 3
    assert replace(PLAIN, memory_share=0.5).seconds(kernel()) == 6
    assert replace(PLAIN, kernel_seconds=5.0).seconds(kernel()) == 5
    assert replace(PLAIN, kernel_seconds=5.0).seconds(kernel(launches=2)) == 10
    assert PLAIN.seconds(kernel("native_layer_norm_backward")) == pytest.approx(5)


def test_a_kernel_is_priced_by_its_kind():
    assert PLAIN.seconds(kernel(kind="matmul", shape=(1, 64, 64, 64))) == matmul_seconds(
        PLAIN, "bfloat16", 1, 64, 64, 64
    )
    assert PLAIN.seconds(kernel(kind="attention", shape=(1, 2, 64, 64, 64), flops=500)) == attention_seconds(
        PLAIN, "bfloat16", 500, 64, 64, 64
    )
    decoded = kernel(kind="attention", shape=(1, 1, 1, 64, 64), moved=3000, flops=1)
    assert replace(PLAIN, kernel_seconds=0.0).seconds(decoded) == 30, "the keys and values are read"
    # The matrices of a convolution are not stored: its images and weights count.
    slow_memory = replace(PLAIN, memory_bandwidth=0.02)
    for name, moved in (("convolution", 300), ("mm", 3 * 2 * 64 * 64)):
        product = kernel(name, kind="matmul", shape=(1, 64, 64, 64))
        assert slow_memory.seconds(product) == pytest.approx(moved / 0.02)
    # A depthwise convolution, say, has operations and no shape of a matrix product.
    assert PLAIN.seconds(kernel(kind="matmul", flops=9000)) == 9


def test_an_unknown_device_names_those_that_are_known():
    assert device_named("h100").name == "h100"
    with pytest.raises(LaunchError, match=r"gpu='h10': use one of ") as raised:
        device_named("h10")
    assert all(name in str(raised.value) for name in DEVICES)


def test_a_name_in_capitals_is_the_device():
    assert device_named("H100") is DEVICES["h100"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("b300", "use one of"),
        ("NVIDIA-H100", "did you mean h100?"),
        ("a100-40gb", "did you mean a100-40g?"),
    ],
)
def test_another_device_is_not_taken_for_a_slip(name, told):
    """The b300 is a letter apart from the b200, and another GPU."""
    with pytest.raises(LaunchError, match=f"^gpu='{name}': {re.escape(told)} "):
        device_named(name)


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_devices_of_the_table_are_possible(device):
    assert DEVICES[device.name] is device
    assert 0 < device.matmul_share <= 1
    assert 0 < device.attention_share <= 1
    assert device.communication_sms < device.num_sms
    assert math.isfinite(device.memory_bandwidth)
    assert device.peak_of("int32") == device.peak["float32"]


def test_a_job_has_the_pace_of_its_slowest_device():
    device = DEVICES["h100"]
    assert device.slowest(8) == device
    assert device.slowest(1).matmul_share / device.matmul_share == pytest.approx(1 + 1.4236 * device.spread, rel=1e-3)
    assert device.matmul_share / device.slowest(512).matmul_share == pytest.approx(1 + 1.61 * device.spread, rel=1e-3)
    assert device.slowest(512).slowest(8).attention_share == pytest.approx(device.attention_share, rel=1e-3)
    assert DEVICES["cpu"].slowest(512) is DEVICES["cpu"]
