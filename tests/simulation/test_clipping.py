"""Gradient clipping over parameters of several device meshes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import implicit_replication

from echelon import foresee, simulate


def clips(device, second, how):
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    layers = nn.Linear(8, 8).to(device), nn.Linear(8, 8).to(device)
    fully_shard(layers[0], mesh=mesh["dp"])
    if second:
        fully_shard(layers[1], mesh=mesh[second] if second != "both" else mesh)
    layers[1](layers[0](torch.ones(4, 8, device=device))).sum().backward()
    groups = [list(each.parameters()) for each in layers]
    if how == "scales":
        nn.utils.clip_grads_with_norm_([*groups[0], *groups[1]], 1.0, torch.ones((), device=device))
    elif how == "each":
        for group in groups:
            nn.utils.clip_grad_norm_(group, 1.0)
    elif how == "implicitly":
        with implicit_replication():
            nn.utils.clip_grad_norm_([*groups[0], *groups[1]], 1.0)
    else:
        nn.utils.clip_grad_norm_([*groups[0], *groups[1]], 1.0)


MIXED = [
    (("", "at once"), r"2 on the mesh \(dp=2\), 2 that are plain tensors"),
    (("tp", "at once"), r"2 on the mesh \(dp=2\), 2 on the mesh \(tp=2\)"),
    (("both", "at once"), r"2 on the mesh \(dp=2\), 2 on the mesh \(dp=2, tp=2\)"),
    (("tp", "scales"), r"2 on the mesh \(dp=2\), 2 on the mesh \(tp=2\)"),
]


@pytest.mark.parametrize(("args", "groups"), MIXED, ids=["plain", "other mesh", "larger mesh", "scaling"])
def test_mixed_meshes_are_named_in_one_line(args, groups):
    message = rf"^clipping mixes gradients .*: {groups}: .*call clip_grad_norm_ once for the parameters of each(\n|$)"
    with pytest.raises(RuntimeError, match=message):
        simulate(clips, 4, ("cpu", *args))
    with pytest.raises(RuntimeError, match=message):
        foresee(clips, 4, ("cuda", *args))


@pytest.mark.parametrize("args", [("tp", "each"), ("", "each"), ("", "implicitly")])
def test_clipping_that_torch_does_is_left_as_it_is(args):
    simulate(clips, 4, ("cpu", *args))
    assert foresee(clips, 4, ("cuda", *args)).step_seconds > 0


def test_other_errors_of_clipping_stay():
    def main():
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.tensor([float("nan"), 1.0])
        nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)

    with pytest.raises(RuntimeError, match="non-finite"):
        simulate(main, 1)
