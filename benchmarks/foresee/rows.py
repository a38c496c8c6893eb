"""Published rows, and constants fitted on some of them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from programs import Recipe


class Row(NamedTuple):
    """A published measurement."""

    recipe: Recipe
    """With an accumulation of at most 2: further microbatches are like the second one."""
    gpu: str
    accumulation: int
    is_compiled: bool
    tokens_per_second: float
    """Of one GPU."""
    reserved_gib: float | None
    source: str

    @property
    def tokens(self) -> int:
        """Tokens of one GPU in a step."""
        return self.recipe.microbatch * self.recipe.length * self.accumulation

    @property
    def is_mpt(self) -> bool:
        return self.recipe.model.startswith("mpt")

    def __str__(self) -> str:
        recipe = self.recipe
        batch = f"{recipe.microbatch} x {self.accumulation} x {recipe.length}"
        return f"{recipe.model}, {recipe.world_size} x {self.gpu}, {batch}"


FITTED = {
    # gpu: rows for the share of matrix products, rows for the share of MPT's attention kernel
    "h100": (("mpt-7b, 8 x h100, 6 x 1 x 2048",), ("mpt-7b, 8 x h100, 1 x 2 x 65536",)),
    "a100": (
        ("mpt-7b, 8 x a100, 6 x 2 x 2048", "llama2-13b, 64 x a100, 2 x 1 x 4096"),
        ("mpt-7b, 8 x a100, 1 x 2 x 65536",),
    ),
    "a100-40g": (("mpt-7b, 8 x a100-40g, 12 x 4 x 2048",), ("mpt-1b, 8 x a100-40g, 1 x 4 x 32768",)),
    "h100-500w": (("llama3-8b, 8 x h100-500w, 2 x 1 x 8192",), ()),
}
"""Rows on which constants were fitted. Of rows with one name the first counts."""

MPT_ATTENTION = {"a100": 0.330, "a100-40g": 0.327, "h100": 0.187}
"""Share of the peak of MPT's attention kernel of 2023, fitted. The table of devices has FlashAttention-2's."""

NETWORKS = {
    "a100": "infiniband-200g",
    "a100-40g": "infiniband-200g",
    "h100": "infiniband-400g",
    "h100-500w": "infiniband-400g",
}


def published() -> list[Row]:
    """Returns all rows, in the order of the file."""
    with (Path(__file__).parent / "published.csv").open(newline="") as file:
        return [_row(cells) for cells in csv.DictReader(file)]


def _row(cells: dict[str, str]) -> Row:
    accumulation = int(cells["accumulation"])
    recipe = Recipe(
        cells["model"],
        int(cells["gpus"]),
        int(cells["microbatch"]),
        int(cells["length"]),
        cells["checkpointing"],
        min(accumulation, 2),
        cells["reduce"],
        cells["fused_norm"] == "yes",
    )
    return Row(
        recipe,
        cells["gpu"],
        accumulation,
        cells["compiled"] == "yes",
        float(cells["tokens_per_second"]),
        float(cells["reserved_gib"]) if cells["reserved_gib"] else None,
        cells["source"],
    )
