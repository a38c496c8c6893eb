"""Published training speeds of convolutional networks, beside their forecast. No constant was fitted on them.

python benchmarks/foresee/convnets.py      takes a minute
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import echelon

SOURCE = (
    "NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets: README.md of resnet50v1.5, resnext101-32x4d and "
    "se-resnext101-32x4d (DGX A100 with 8 A100 80 GB, container 21.03), and configs.yml"
)


class Row(NamedTuple):
    """Published images per second of one GPU and of eight."""

    model: str
    is_mixed: bool
    """float16 by autocast with channels last. Otherwise float32 by TF32, with torch's default layout."""
    batch: int
    one: int
    eight: int


ROWS = (
    Row("resnet50", False, 256, 938, 7248),
    Row("resnet50", True, 256, 2470, 16621),
    Row("resnext101-32x4d", False, 128, 456, 3471),
    Row("resnext101-32x4d", True, 128, 1211, 7925),
    Row("se-resnext101-32x4d", False, 128, 395, 2991),
    Row("se-resnext101-32x4d", True, 128, 855, 5779),
)
LAYERS = {"resnet50": (3, 4, 6, 3), "resnext101-32x4d": (3, 4, 23, 3), "se-resnext101-32x4d": (3, 4, 23, 3)}


class SqueezeAndExcitation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze, self.expand = nn.Linear(width, width // 16), nn.Linear(width // 16, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.expand(F.relu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return x * scale[:, :, None, None]


class Bottleneck(nn.Module):
    """Block with the stride in its 3 x 3 convolution."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int, has_scale: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.scale = SqueezeAndExcitation(outputs) if has_scale else nn.Identity()
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.scale(self.body(x)) + self.shortcut(x), inplace=True)


def network(name: str) -> nn.Module:
    """Returns ResNet-50, or (SE-)ResNeXt-101 32x4d, for 1,000 classes."""
    groups, per_width = (1, 1) if name == "resnet50" else (32, 2)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for index, count in enumerate(LAYERS[name]):
        outputs = 256 << index
        for block in range(count):
            stride = 2 if index and not block else 1
            layers.append(Bottleneck(inputs, outputs // 4 * per_width, outputs, stride, groups, name.startswith("se-")))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def train(row: Row) -> None:
    """Trains for two steps on random images."""
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    layout = torch.channels_last if row.is_mixed else torch.contiguous_format
    model = DistributedDataParallel(network(row.model).cuda().to(memory_format=layout), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=128, enabled=row.is_mixed)
    images = torch.randn(row.batch, 3, 224, 224, device="cuda").to(memory_format=layout)
    labels = torch.randint(0, 1000, (row.batch,), device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=row.is_mixed):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main() -> None:
    """Prints the table."""
    print(f"torch {torch.__version__}, echelon {echelon.__version__}. Source: {SOURCE}\n")
    print(
        "| model | computes in | GPUs | batch of a GPU | published, images/s | foreseen, images/s | error of the time |"
    )
    print("|---|---|---|---|---|---|---|")
    errors = []
    for world_size in (1, 8):
        for row in ROWS:
            seen = echelon.foresee(train, world_size, (row,), gpu="a100", hosts=1)
            published = row.one if world_size == 1 else row.eight
            foreseen = row.batch * world_size / seen.step_seconds
            errors.append(published / foreseen - 1)
            computes = "float16, channels last" if row.is_mixed else "TF32"
            print(
                f"| {row.model} | {computes} | {world_size} | {row.batch} | {published:,} | {foreseen:,.0f} | "
                f"{errors[-1]:+.1%} |",
                flush=True,
            )
    print(f"\nmedian error {statistics.median(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
