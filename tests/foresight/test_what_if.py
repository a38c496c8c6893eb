"""A step if its communication cost less."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from echelon import foresee
from echelon.foresight.play.player import play
from echelon.foresight.report import Report, seconds_text
from echelon.foresight.trace import TF32
from echelon.foresight.what_if import what_ifs
from tests.helpers.traces import LINKS, PLAIN, Step

ONE_HOST = replace(LINKS, hosts=(4,))


def found(step, cluster=LINKS):
    return what_ifs_on(PLAIN, step, cluster)


def what_ifs_on(device, step, cluster):
    traces = {0: step.trace()}
    return what_ifs(play(traces, [0] * 4, device, cluster), traces)


def test_the_longest_line_and_a_faster_network_are_tried():
    step = Step(groups=((0, 2),)).kernel(1).collective(1, 6, blocking=True).kernel(1).collective(2, 2, blocking=True)
    slow = replace(LINKS, latency=0.0, local_latency=0.0)
    (total, group), hidden = (8.0, 6.0), "communication of g0 at train.py:2 were hidden by kernels: at best "
    before = play({0: step.trace()}, [0] * 4, PLAIN, slow).seconds
    exposed = before - 2
    first, second = found(step, slow)
    assert first == f"{hidden}{before - exposed * group / total:.2f} s instead of {before:.2f} s " + (
        f"({-exposed * group / total / before:+.1%})"
    )
    assert second == (
        f"the network between hosts were twice as fast: {before - exposed / 2:.2f} s instead of {before:.2f} s "
        f"({-exposed / 2 / before:+.1%})"
    )


def test_one_host_has_no_network():
    step = Step(groups=((0, 1),)).kernel(1).collective(1, 40, blocking=True)
    assert len(found(step, replace(LINKS, hosts=(4,)))) == 1
    assert found(step)[1] == "the network between hosts were twice as fast: no change"  # both ranks are on one


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        # It reaches half of the peak.
        (
            {"kind": "attention", "dtype": "bfloat16", "flops": 45_000, "shape": (1, 1, 10**9, 10**9, 128)},
            "attention ran at the peak of the GPU: 55.00 s instead of 100.00 s (-45.0%)",
        ),
        (
            {"kind": "matmul", "dtype": "bfloat16", "flops": 60_000},
            "matrix products ran at the peak of the GPU: 70.00 s instead of 100.00 s (-30.0%)",
        ),
        ({}, "kernels but matmul and attention took no time: at best 10.00 s instead of 100.00 s (-90.0%)"),
    ],
)
def test_with_hidden_communication_the_longest_kernels_are_tried(kernel, text):
    ten = {"kind": "matmul", "dtype": "bfloat16", "flops": 10_000} if not kernel else {}
    hidden = Step(groups=((0, 2),)).collective(1, 4).kernel(90, **kernel).kernel(10, **ten)
    faster = "the network between hosts were twice as fast: no change"
    assert found(hidden) == [text, faster]
    assert found(hidden, replace(LINKS, hosts=(4,))) == [text]


def test_kernels_that_are_not_the_longest_part_or_were_measured_are_not_tried():
    step = Step().kernel(2).on_host(20).host_wait()
    assert len(found(step, replace(LINKS, hosts=(4,)))) == 0
    curves = {"add": ((1.0, 1.0), (2.0, 2.0))}
    assert what_ifs_on(replace(PLAIN, curves=curves), Step().kernel(2), replace(LINKS, hosts=(4,))) == []


def test_products_of_float32_are_tried_with_tf32():
    device = replace(PLAIN, peak={**PLAIN.peak, TF32: 1000.0})
    text = "products of float32 used TF32, as by torch.set_float32_matmul_precision('high'): "
    product = {"kind": "matmul", "flops": 5_000}  # 10 s in float32, 5 s by TF32
    long, short, half = (
        what_ifs_on(device, Step().kernel(other).kernel(1, dtype=dtype, **product), ONE_HOST)
        for other, dtype in ((40, "float32"), (91, "float32"), (40, "bfloat16"))
    )
    assert f"{text}45.00 s instead of 50.00 s (-10.0%)" in long
    by_images = Step().kernel(40).kernel(1, name="convolution", dtype="float32", **product)  # not by that setting
    assert not any(text in each for each in what_ifs_on(device, by_images, ONE_HOST))
    assert not any(text in each for each in (*short, *half, *found(Step().kernel(1, dtype="float32", **product))))


def test_images_are_tried_with_channels_last():
    def program(layout, compiled):
        model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)).cuda().to(memory_format=layout)
        run = torch.compile(model) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            run(torch.ones(256, 64, 56, 56, device="cuda").to(memory_format=layout)).sum().backward()
            optimizer.step()

    plain, last, compiled = (
        foresee(program, 1, (layout, is_compiled), gpu="a100")
        for layout, is_compiled in (
            (torch.contiguous_format, False),
            (torch.channels_last, False),
            (torch.contiguous_format, True),
        )
    )
    (text,) = (each for each in plain.what_ifs if each.startswith("images had channels last"))
    # Without the copy of the batch into that layout, which a real program makes once.
    copy = 2 * 4 * 256 * 64 * 56 * 56 / (plain.device.memory_bandwidth * plain.device.memory_share)
    assert f": {seconds_text(last.step_seconds - copy)} instead of {seconds_text(plain.step_seconds)}" in text
    (text,) = (each for each in plain.what_ifs if each.startswith("torch.compile"))
    assert f": {seconds_text(compiled.step_seconds)} instead of {seconds_text(plain.step_seconds)}" in text
    assert not any("channels last" in each for each in (*last.what_ifs, *compiled.what_ifs))


def test_small_kernels_are_tried_as_compiled_ones():
    def program(compiled, device):
        model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.Tanh()).to(device, torch.bfloat16)
        run = torch.compile(model) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            run(torch.ones(65536, 512, device=device, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()

    plain, compiled = (foresee(program, 1, (each, "cuda"), gpu="h100") for each in (False, True))
    text = f"torch.compile joined the small kernels of the modules: {seconds_text(compiled.step_seconds)} instead of "
    assert plain.what_ifs[0].startswith(f"{text}{seconds_text(plain.step_seconds)} (-")
    assert not any("torch.compile" in each for each in compiled.what_ifs)
    assert not any("torch.compile" in each for each in foresee(program, 1, (False, "cpu"), gpu="cpu").what_ifs)


def test_a_step_without_time_has_no_forecasts():
    assert found(Step()) == []


def test_the_report_shows_them():
    traces = {0: Step().kernel(1).trace()}
    report = Report(play(traces, [0] * 4, PLAIN, LINKS), what_ifs=["pigs could fly: 1 s"])
    assert "what if\n- pigs could fly: 1 s\n" in str(report)
    assert report.to_json()["what_if"] == ["pigs could fly: 1 s"]
