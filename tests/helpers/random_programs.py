"""Random programs of collectives and messages, run by a group's ranks, and their results from one process.

A program is a tuple of steps that every rank takes in order. A rank that is not in a step's group skips it. A step may
be a mistake, which must end in the same error on every rank of its group. A disagreement ends its group, so it comes
last; a rank that is still in an earlier operation of that group by then may raise the same error there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

import echelon
from echelon._torch_private.tensors import fake_tensors
from tests.helpers.collective_cases import Case, bytes_of, cases, check, expected, input_of, laid_out, splits_of

MODES = ("plain", "no_grad", "inference")
REFUSALS = ("op", "root", "sparse", "meta", "overlap", "fake", "vmap", "inference")
DISAGREEMENTS = ("other op", "other dtype", "other shape", "other collective")


class Collective(NamedTuple):
    """One collective. Rank r of its group takes `layouts[r % 4]` and `modes[r % 4]`."""

    case: Case
    members: tuple[int, ...]
    """Ranks of the world; (): all of them."""
    layouts: tuple[str, str, str, str]
    modes: tuple[str, str, str, str]
    asynchronous: bool
    delay: int
    """Steps until an asynchronous one is waited for."""


class Message(NamedTuple):
    """One tensor from rank `src` to rank `dst`, taken modulo the number of ranks."""

    case: Case
    src: int
    dst: int
    tag: int
    layout: str
    modes: tuple[str, str]
    asynchronous: bool


class Other(NamedTuple):
    """A barrier, an all_gather of objects, or an all_reduce of tensors that `group.empty` made."""

    name: str
    members: tuple[int, ...]
    seed: int


class Mistake(NamedTuple):
    """A call that is wrong on all ranks (a refusal), or that differs on one of them (a disagreement)."""

    kind: str
    members: tuple[int, ...]
    culprit: int


class Program(NamedTuple):
    """A number of ranks, and their steps."""

    world_size: int
    steps: tuple[Collective | Message | Other | Mistake, ...]


@st.composite
def programs(draw: st.DrawFn, world_sizes: tuple[int, ...] = (2, 3, 4)) -> Program:
    """Draws a program of one to six steps."""
    size = draw(st.sampled_from(world_sizes))
    subsets = [(), *((*range(first, size), *range(first))[:count] for first in range(size) for count in range(1, size))]
    groups = st.sampled_from(subsets)
    modes = st.sampled_from(MODES)
    collectives = st.builds(
        Collective,
        cases(),
        groups,
        st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
        st.tuples(*[modes] * 4),
        st.booleans(),
        st.integers(0, 3),
    )
    messages = st.builds(
        Message,
        cases(),
        st.integers(0, size - 1),
        st.integers(1, size - 1),
        st.integers(0, 3),
        st.sampled_from(LAYOUTS),
        st.tuples(modes, modes),
        st.booleans(),
    )
    others = st.builds(Other, st.sampled_from(["barrier", "all_gather_object", "empty"]), groups, st.integers(0, 1000))
    refusals = st.builds(Mistake, st.sampled_from(REFUSALS), groups, st.integers(0, 3))
    disagreements = st.builds(
        Mistake,
        st.sampled_from(DISAGREEMENTS),
        st.sampled_from([subset for subset in subsets if len(subset) != 1]),
        st.integers(0, 3),
    )
    steps = draw(st.lists(st.one_of(collectives, collectives, messages, others, refusals), min_size=1, max_size=6))
    if draw(st.integers(0, 3)) == 0:  # the group that it ends is not used again
        steps.append(draw(disagreements))
    return Program(size, tuple(steps))


LAYOUTS = (
    *("plain", "transposed", "strided", "leaf", "grown", "conj", "neg", "offset", "expanded"),
    *("inference", "inference conj", "inference strided"),
)


def tensor_of(values: torch.Tensor, layout: str, *, written: bool, inference: bool) -> torch.Tensor:
    """Returns the values as a tensor of a layout, or of the nearest that their dtype and their use allow.

    Args:
        values: of the tensor.
        layout: one of LAYOUTS.
        written: the tensor is written in place.
        inference: the call is made in inference mode.
    """
    differentiable = values.is_floating_point() or values.is_complex()
    if layout == "conj" and values.is_complex():
        return values.conj().resolve_conj().conj()
    if layout == "neg" and values.is_floating_point() and values.dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(values), values.neg()).conj().imag
    if layout == "grown" and differentiable:
        return values.clone().requires_grad_() * 1
    if layout == "offset":
        return torch.cat([values[:1], values])[len(values[:1]) :] if values.dim() else values.clone()
    if layout.startswith("inference"):
        if written and not inference:  # refused: that is one of the mistakes
            return values.clone()
        with torch.inference_mode():
            kept = layout.removeprefix("inference").strip() or "plain"
            return tensor_of(values, kept, written=written, inference=True)
    if layout == "expanded" and not written and values.numel() and bool((values == values.flatten()[0]).all()):
        return values.flatten()[:1].clone().expand(values.numel()).view(values.shape)
    return laid_out(values, layout if layout in ("transposed", "strided", "leaf") else "plain")


def mode(name: str):
    """Returns the context that a call is made in."""
    return {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[name]()


class Packed(NamedTuple):
    """A tensor that goes from one process to another: pickle knows not all dtypes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: bytes

    def tensor(self) -> torch.Tensor:
        content = bytearray(self.content)
        empty = torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(content, dtype=self.dtype).view(self.shape) if content else empty


def run(world: echelon.ProcessGroup, program: Program) -> list[object]:
    """Takes the steps of a program as one rank; returns a result for each: a Packed, None, or an error's type."""
    results = Run(world).steps(program)
    return [pack(result) if isinstance(result, torch.Tensor) else result for result in results]


def pack(tensor: torch.Tensor) -> Packed:
    return Packed(tensor.dtype, tuple(tensor.shape), bytes_of(tensor.resolve_conj().resolve_neg()).numpy().tobytes())


class Run:
    """One rank's way through a program."""

    def __init__(self, world: echelon.ProcessGroup) -> None:
        self.world = world
        self.groups: dict[tuple[int, ...], echelon.ProcessGroup | None] = {(): world}
        self.under_way: list[tuple[int, int, object]] = []
        """Of each asynchronous call: after which step it is waited for, its own step, its Work."""
        self.results: list[object] = []

    def steps(self, program: Program) -> list[object]:
        ended = ends_with(program)
        for number, step in enumerate(program.steps):
            self.results.append(None)
            try:
                if isinstance(step, Message):
                    self.message(number, step)
                elif (group := self.group(step.members)) is not None:
                    self.results[number] = self.call(number, step, group)
            except echelon.CollectiveMismatch as error:
                if members_of(step) != ended:
                    raise
                self.results[number] = type(error)
            self.wait(number, program)
        self.wait(len(program.steps) + 10, program)
        return self.results

    def group(self, members: tuple[int, ...]) -> echelon.ProcessGroup | None:
        if members not in self.groups:
            self.groups[members] = self.world.subgroup(members)
        return self.groups[members]

    def wait(self, number: int, program: Program) -> None:
        due = [waiting for waiting in self.under_way if waiting[0] <= number]
        self.under_way = [waiting for waiting in self.under_way if waiting[0] > number]
        for _, step, work in due:
            try:
                found = work.wait(20.0)
            except echelon.CollectiveMismatch as error:
                if members_of(program.steps[step]) != ends_with(program):
                    raise
                self.results[step] = type(error)
            else:
                self.results[step] = None if found is None else found.detach().clone()

    def call(self, number: int, step: Collective | Other | Mistake, group: echelon.ProcessGroup) -> object:
        if isinstance(step, Mistake):
            return mistaken(step, group)
        if isinstance(step, Other):
            return other(step, group)
        with mode(step.modes[group.rank % 4]):
            found = collective(step, group)
        if step.asynchronous:
            self.under_way.append((number + step.delay, number, found))
            return None
        return found if found is None else found.detach().clone()

    def message(self, number: int, step: Message) -> None:
        src, dst = ends(step, self.world.world_size)
        rank = self.world.rank
        if rank == src:
            with mode(step.modes[0]):
                values = input_of(step.case, src)
                tensor = tensor_of(values, step.layout, written=False, inference=step.modes[0] == "inference")
                self.world.isend(tensor, dst, step.tag).wait(20.0)
        elif rank == dst:
            with mode(step.modes[1]):
                out = torch.zeros_like(input_of(step.case, src)) if step.case.with_out else None
                if step.asynchronous:
                    self.under_way.append((number + 2, number, self.world.irecv(src, step.tag, out)))
                else:
                    self.results[number] = self.world.recv(src, step.tag, out).detach().clone()


def members_of(step: Collective | Message | Other | Mistake) -> tuple[int, ...]:
    """The ranks of the group that a step is in; (): all ranks."""
    return () if isinstance(step, Message) else step.members


def ends_with(program: Program) -> tuple[int, ...] | None:
    """The group that ends in a disagreement; None: all go on."""
    last = program.steps[-1]
    return last.members if isinstance(last, Mistake) and last.kind in DISAGREEMENTS else None


def ends(step: Message, size: int) -> tuple[int, int]:
    """The sender and the receiver."""
    return step.src % size, (step.src + step.dst) % size


def collective(step: Collective, group: echelon.ProcessGroup) -> object:
    """Makes a collective's call; returns its result or its Work."""
    case, rank, beside = step.case, group.rank, step.asynchronous
    root = case.root % group.world_size
    inference = step.modes[rank % 4] == "inference"
    written = case.name == "all_reduce" or (case.name == "reduce" and rank == root)
    written |= case.name == "broadcast" and rank != root
    layout = step.layouts[rank % 4]
    tensor = tensor_of(input_of(case, rank), layout, written=written, inference=inference)
    if case.name == "all_reduce":
        return group.all_reduce(tensor, case.op, async_op=beside)
    if case.name == "reduce":
        return group.reduce(tensor, root, case.op, async_op=beside)
    if case.name == "broadcast":
        return group.broadcast(tensor, root, async_op=beside)
    wanted = expected(case, group.world_size)[rank] if case.with_out else None
    out = None
    if wanted is not None:
        out = tensor_of(
            torch.zeros_like(wanted), "strided" if layout == "strided" else "plain", written=True, inference=inference
        )
    if case.name == "reduce_scatter":
        return group.reduce_scatter(tensor, case.op, out=out, async_op=beside)
    if case.name == "all_gather":
        return group.all_gather(tensor, out=out, async_op=beside)
    if case.name == "gather":
        return group.gather(tensor, root, out=out, async_op=beside)
    if case.name == "scatter":
        return group.scatter(tensor if rank == root else None, root, out=out, async_op=beside)
    splits = splits_of(case, rank, group.world_size) if case.uneven else None
    return group.all_to_all(tensor, out=out, in_splits=splits, async_op=beside)


def other(step: Other, group: echelon.ProcessGroup) -> object:
    """Runs a barrier, an all_gather of objects, or an all_reduce of shared tensors."""
    if step.name == "barrier":
        group.barrier()
        return None
    if step.name == "all_gather_object":
        return torch.tensor(group.all_gather_object(step.seed + group.rank))
    tensor = group.empty((step.seed, 2), dtype=torch.int32).fill_(group.rank + 1)
    return group.all_reduce(tensor).clone()


def mistaken(step: Mistake, group: echelon.ProcessGroup) -> type[Exception]:
    """Makes a wrong call, and one that is right after it where the group goes on; returns the error's type."""
    try:
        if step.kind in REFUSALS:
            refused(step.kind, group)
        else:
            disagreed(step.kind, group, group.rank == step.culprit % group.world_size)
            group.barrier()  # at this operation, or at the next
    except (echelon.EchelonError, RuntimeError) as error:
        if step.kind in REFUSALS:
            assert group.all_reduce(torch.ones(3))[0] == group.world_size
        return type(error)
    raise AssertionError(f"{step.kind} went unnoticed")


def refused(kind: str, group: echelon.ProcessGroup) -> None:
    """Makes a call that no rank's group takes."""
    tensor = torch.ones(3, 3)
    if kind == "op":
        group.all_reduce(tensor, "band")
    elif kind == "root":
        group.broadcast(tensor, src=group.world_size)
    elif kind == "sparse":
        group.all_gather(tensor.to_sparse())
    elif kind == "meta":
        group.all_reduce(tensor.to("meta"))
    elif kind == "fake":
        with fake_tensors():
            fake = torch.ones(3, 3)
        group.reduce_scatter(fake)
    elif kind == "vmap":
        torch.func.vmap(lambda row: group.all_gather(row))(tensor)
    elif kind == "inference":
        with torch.inference_mode():
            made = torch.ones(3, 3)
        group.all_reduce(made)
    else:
        group.all_reduce(torch.ones(9).as_strided((3, 3), (1, 1)))


def disagreed(kind: str, group: echelon.ProcessGroup, differs: bool) -> None:
    """Makes a call in which one rank differs."""
    shape = (4,) if kind == "other shape" and differs else (3,)
    tensor = torch.ones(shape, dtype=torch.float64 if kind == "other dtype" and differs else torch.float32)
    if kind == "other collective" and differs:
        group.broadcast(tensor, src=0)
    else:
        group.all_reduce(tensor, "max" if kind == "other op" and differs else "sum")


NOT_REACHED = "the group ended before"


def verify(program: Program, ranks: list[list[object]]) -> None:
    """Compares what all ranks found with what one process that has all inputs finds."""
    ended = ends_with(program)
    for number, step in enumerate(program.steps):
        found = [results[number] for results in ranks]
        found = [result.tensor() if isinstance(result, Packed) else result for result in found]
        if members_of(step) == ended and number < len(program.steps) - 1:
            found = [NOT_REACHED if result is echelon.CollectiveMismatch else result for result in found]
        if isinstance(step, Message):
            src, dst = ends(step, program.world_size)
            if found[dst] is not NOT_REACHED:
                check(step.case._replace(name="broadcast", op="sum"), found[dst], input_of(step.case, src))
            continue
        members = step.members or tuple(range(program.world_size))
        of_group = [found[member] for member in members]
        if isinstance(step, Mistake):
            wanted = refusal_of(step.kind)
            assert all(got in (wanted, NOT_REACHED) for got in of_group), f"{step}: {of_group}"
        elif isinstance(step, Collective):
            for got, result in zip(of_group, expected(step.case, len(members)), strict=True):
                if got is not NOT_REACHED:
                    check(step.case, got, result)
        elif step.name == "all_gather_object":
            everyone = [step.seed + rank for rank in range(len(members))]
            assert all(got is NOT_REACHED or got.tolist() == everyone for got in of_group), step
        elif step.name == "empty":
            total = sum(range(1, len(members) + 1))
            wanted = torch.full((step.seed, 2), total, dtype=torch.int32)
            assert all(got is NOT_REACHED or torch.equal(got, wanted) for got in of_group), step
        assert all(found[rank] is None for rank in range(program.world_size) if rank not in members), step


def refusal_of(kind: str) -> type[Exception]:
    """The error that every rank is to raise."""
    if kind in ("root", "inference"):  # torch itself refuses to overwrite an inference tensor outside of the mode
        return echelon.InvalidRank if kind == "root" else RuntimeError
    return echelon.UnsupportedOp if kind in REFUSALS else echelon.CollectiveMismatch
