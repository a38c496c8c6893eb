"""Group normalisation of recorded ranks: contiguous on a GPU, in the layout of its images on the CPU."""

from threading import Thread

import pytest
import torch
from torch import nn
from torch.nn.functional import group_norm

from echelon import foresee
from echelon.foresight.trace import Allocate, Kernel

IMAGES = 4, 64, 16, 16
LAST, FIRST = torch.channels_last, torch.contiguous_format


def network(layout, device, found):
    """A step of a normalisation between two others that keep the layout of their images."""
    model = nn.Sequential(nn.SiLU(), nn.GroupNorm(8, IMAGES[1]), nn.SiLU()).to(device)
    x = torch.ones(IMAGES, device=device, requires_grad=True)
    y = model(x.to(memory_format=layout))
    found.append(y.is_contiguous(memory_format=layout))
    y.square().sum().backward()


def names(layout, device):
    found = []
    seen = foresee(network, 1, (layout, device, found), gpu="cpu" if device == "cpu" else "h100")
    return seen, [each.name for each in seen.traces[0].entries if isinstance(each, Kernel)], set(found)


def test_images_with_channels_last_are_copied_on_a_gpu():
    _, found, keeps = names(LAST, "cuda")
    assert keeps == {False}
    forward, backward = found.index("native_group_norm"), found.index("native_group_norm_backward")
    assert found[forward - 1] == "clone"
    assert found.count("clone") == 1
    assert forward < backward


def test_a_gradient_with_channels_last_is_copied_on_a_gpu():
    def program():
        x = torch.ones(IMAGES, device="cuda", requires_grad=True)
        y = group_norm(x, 8)
        y.backward(torch.ones_like(y).to(memory_format=LAST))

    kernels = [each.name for each in foresee(program, 1).traces[0].entries if isinstance(each, Kernel)]
    assert kernels[kernels.index("native_group_norm_backward") - 1] == "clone"


def test_the_copy_is_kept_for_backward():
    sizes = []
    for layout in (FIRST, LAST):
        entries = names(layout, "cuda")[0].traces[0].entries
        backward = next(place for place, each in enumerate(entries) if getattr(each, "phase", "") == "backward")
        sizes.append([each.num_bytes for each in entries[:backward] if isinstance(each, Allocate)])
    image = 4 * torch.Size(IMAGES).numel()
    # The copy into the layout before the model, and the one for the normalisation.
    assert sizes[1].count(image) == sizes[0].count(image) + 2


@pytest.mark.parametrize(("layout", "device"), [(FIRST, "cuda"), (LAST, "cpu"), (FIRST, "cpu")])
def test_others_keep_their_layout(layout, device):
    _, found, keeps = names(layout, device)
    assert keeps == {True}
    assert "clone" not in found


def test_channels_last_are_not_advised_where_a_norm_undoes_them():
    def program(norm):
        model = nn.Sequential(nn.Conv2d(64, 64, 3), norm, nn.ReLU(), nn.Conv2d(64, 64, 3)).cuda()
        model(torch.ones(256, 64, 56, 56, device="cuda")).sum().backward()

    by_group, by_batch = (
        any("channels last" in each for each in foresee(program, 1, (norm,)).what_ifs)
        for norm in (nn.GroupNorm(8, 64), nn.BatchNorm2d(64))
    )
    assert (by_group, by_batch) == (False, True)


def test_other_threads_and_transforms_compute_it():
    def results():
        x = torch.arange(64.0).reshape(2, 4, 2, 4).to(memory_format=LAST).requires_grad_()
        y = group_norm(x, 2)
        y.square().sum().backward()
        return y.detach(), x.grad

    expected, during = results(), []

    def program():
        torch.func.grad(lambda x: group_norm(x, 2).sum())(torch.ones(2, 4, 2, 4, device="cuda"))
        thread = Thread(target=lambda: during.extend(results()))
        thread.start()
        thread.join()

    foresee(program, 1)
    assert len(during) == 2
    assert all(torch.equal(*pair) for pair in zip(during, expected, strict=True))
