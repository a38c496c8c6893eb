"""Programs of collectives on a mesh, one call a line, with a mistake on one rank."""

import random
import textwrap
from typing import NamedTuple

RANKS = 4
HEAD = textwrap.dedent(
    """\
    import os, torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp, world = mesh["dp"].get_group(), mesh["tp"].get_group(), dist.group.WORLD
    rank = dist.get_rank()
    def of(size, dtype="float32"): return torch.empty(size, dtype=getattr(torch, dtype), device="cuda")
    """
)
GROUPS = ("dp", "tp", "world")
SIZES = {"dp": 2, "tp": 2, "world": 4}


class Call(NamedTuple):
    kind: str
    group: str
    size: int
    dtype: str = "float32"
    op: str = "SUM"
    root: int = 0

    def line(self):
        tensor, n = f"of({self.size}, {self.dtype!r})", SIZES[self.group]
        whole = f"of({self.size * n}, {self.dtype!r})"
        root = f"dist.get_global_rank({self.group}, {self.root})"
        return {
            "all_reduce": f"dist.all_reduce({tensor}, dist.ReduceOp.{self.op}, group={self.group})",
            "all_gather": f"dist.all_gather_into_tensor({whole}, {tensor}, group={self.group})",
            "reduce_scatter": f"dist.reduce_scatter_tensor({tensor}, {whole}, dist.ReduceOp.{self.op}, {self.group})",
            "broadcast": f"dist.broadcast({tensor}, {root}, group={self.group})",
        }[self.kind]


class Planted(NamedTuple):
    source: str
    mistake: str
    rank: int
    lines: tuple[int, ...]
    """Lines of which the error has to name one for each side, those of the mistake first."""


def draw(random: random.Random):
    kind = random.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast"))
    return Call(kind, random.choice(GROUPS), random.choice((16, 64, 256)))


def plant(seed):
    """Returns a program of 3 to 8 calls in which one rank makes one mistake."""
    draws = random.Random(seed)
    calls = [draw(draws) for _ in range(draws.randint(3, 8))]
    rank, at = draws.randrange(RANKS), draws.randrange(len(calls))
    call = calls[at]
    others = {
        "other kind": call._replace(kind="all_reduce" if call.kind != "all_reduce" else "broadcast"),
        "other size": call._replace(size=call.size * 2),
        "other dtype": call._replace(dtype="bfloat16"),
        "other op": call._replace(op="MAX"),
        "other root": call._replace(root=1),
        "extra call": call,
        "missing call": None,
    }
    if call.kind not in ("all_reduce", "reduce_scatter"):
        del others["other op"]
    if call.kind != "broadcast":
        del others["other root"]
    mistake = draws.choice(sorted(others))
    lines, first = HEAD.splitlines(), 0
    for number, each in enumerate(calls):
        if number != at:
            lines.append(each.line())
        elif mistake == "extra call":
            first = len(lines) + 2
            lines += [f"if rank == {rank}:", f"    {each.line()}", each.line()]
        elif mistake == "missing call":
            first = len(lines) + 2
            lines += [f"if rank != {rank}:", f"    {each.line()}"]
        else:
            first = len(lines) + 2
            lines += [f"if rank == {rank}:", f"    {others[mistake].line()}", "else:", f"    {each.line()}"]
    return Planted("\n".join(lines), mistake, rank, (first, first + 2))
