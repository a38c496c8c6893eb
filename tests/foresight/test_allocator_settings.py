"""Settings of PyTorch's allocator by a rank's environment."""

import os

import pytest
import torch

from echelon import foresee
from echelon.foresight.record.gpu.allocator_settings import AllocatorSettings, allocator_settings

CUDA, ANY = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
MIB = 1 << 20


def assumed(names, verb="is"):
    return f"{CUDA}: {names} {verb} not modelled"


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, (False, "")),
        ({CUDA: ""}, (False, "")),
        ({CUDA: "expandable_segments:True"}, (True, "")),
        ({ANY: "expandable_segments:True"}, (True, "")),
        ({CUDA: "pinned_use_background_threads:True , expandable_segments : True"}, (True, "")),
        ({CUDA: "expandable_segments:True,expandable_segments:False"}, (False, "")),
        # torch looks at the second one only if the first is not set.
        ({CUDA: "", ANY: "expandable_segments:True"}, (False, "")),
        ({CUDA: "max_split_size_mb:128"}, (False, assumed("max_split_size_mb"))),
        ({CUDA: "backend:native"}, (False, "")),
        ({CUDA: "backend:cudaMallocAsync"}, (False, assumed("backend"))),
        (
            {CUDA: "roundup_power2_divisions:[256:1,>:8],garbage_collection_threshold:0.8,expandable_segments:True"},
            (True, assumed("roundup_power2_divisions and garbage_collection_threshold", "are")),
        ),
        ({ANY: "max_split_size_mb:128"}, (False, f"{ANY}: max_split_size_mb is not modelled")),
    ],
    ids=str,
)
def test_settings_are_pairs_of_names_and_values(environment, settings):
    assert allocator_settings(environment) == AllocatorSettings(*settings)


def growing(settings):
    """Tensors of 30, 50 and 70 MiB one after another, on every rank but the first."""
    if int(os.environ["RANK"]):
        os.environ[CUDA] = settings
    for size in (30, 50, 70):
        torch.empty(size * MIB, dtype=torch.uint8, device="cuda").fill_(0)


def test_segments_of_ranks_that_ask_for_it_grow(monkeypatch):
    monkeypatch.delenv(CUDA, raising=False)
    monkeypatch.delenv(ANY, raising=False)
    settings = "expandable_segments:True,max_split_size_mb:128"
    seen = foresee(growing, 2, (settings,), gpu="h100")
    assert seen.peak_memory == (150 * MIB, 80 * MIB)
    assert seen.assumptions[-1] == assumed("max_split_size_mb")
    assert CUDA not in os.environ


def test_processors_have_no_segments(monkeypatch):
    monkeypatch.setenv(CUDA, "expandable_segments:True,max_split_size_mb:128")
    seen = foresee(lambda: torch.ones(4).sum(), 1, gpu="cpu")
    assert not seen.traces[0].has_expandable_segments
    assert not [each for each in seen.assumptions if CUDA in each]
