"""Which dtype works in which collective: tried out, and written down in the documentation."""

import math
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import echelon
from tests.helpers.reductions import digest

DOCS = Path(__file__).parents[2] / "docs" / "collectives.md"
OPS = ("sum", "product", "mean", "min", "max", "band", "bor", "bxor")
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
SHAPES = ((), (0,), (5,), (3, 2))


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def sample(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def attempt(act):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex32, which torch calls experimental
            act()
    except echelon.UnsupportedOp:
        return False
    return True


def try_all(group, dtype):
    """Returns whether tensors are moved, and the ops that they can be reduced with."""
    tensor = sample(dtype, (3,), 0)
    ops = [op for op in OPS if attempt(partial(group.all_reduce, tensor, op))]
    return attempt(partial(group.broadcast, tensor)), ops


def table():
    lines = ["| dtypes | moved | reduced by | accumulated in |", "|---|---|---|---|"]
    rows = {}
    for dtype in DTYPES:
        is_moved, ops = echelon.simulate(try_all, 1, (dtype,)).results[0]
        wide = "itself"
        if ops and dtype.is_floating_point and dtype.itemsize < 4:
            wide = "float32"
        elif dtype == torch.complex32:
            wide = "complex64"
        texts = ("yes" if is_moved else "no", ", ".join(ops) or "nothing", wide if ops else "")
        rows.setdefault(texts, []).append(str(dtype).removeprefix("torch."))
    for (is_moved, ops, wide), names in sorted(
        rows.items(), key=lambda row: (-len(row[0][1]), row[0][0] == "no", row[1])
    ):
        lines.append(f"| {', '.join(names)} | {is_moved} | {ops} | {wide} |")
    return "\n".join(lines)


def test_the_documentation_says_which_dtypes_work():
    text = DOCS.read_text()
    if not hasattr(torch, "bcomplex32"):  # which came with torch 2.15
        text = text.replace("bcomplex32, ", "")
    assert table() in text, f"write this into docs/collectives.md:\n{table()}"


def move_everything(group, names):
    """Every collective that moves, for every shape; the bytes are those that one process would have put together."""
    size, wrong = group.world_size, []
    for name in names:
        dtype = getattr(torch, name)
        for shape in SHAPES:
            inputs = [sample(dtype, shape, rank) for rank in range(size)]
            rows = [tensor.reshape(1) if not shape else tensor for tensor in inputs]
            everything = [byte for tensor in inputs for byte in bytes_of(tensor)]
            mine, last = inputs[group.rank], size - 1
            parts = [bytes_of(tensor.tensor_split(size)[group.rank]) for tensor in rows]
            got = {
                "broadcast": (bytes_of(group.broadcast(mine.clone(), last)), bytes_of(inputs[last])),
                "all_gather": (bytes_of(group.all_gather(mine)), everything),
                "all_gather_coalesced": (bytes_of(group.all_gather_coalesced([mine, mine])[1]), everything),
                "all_to_all": (bytes_of(group.all_to_all(mine)), [byte for part in parts for byte in part]),
            }
            if shape:
                got["scatter"] = (bytes_of(group.scatter(mine, last)), parts[last])
            gathered = group.gather(mine, last)
            got["gather"] = ([] if gathered is None else bytes_of(gathered), everything if group.rank == last else [])
            if size > 1:
                sent = group.sendrecv(mine, (group.rank + 1) % size, (group.rank - 1) % size)
                got["sendrecv"] = (bytes_of(sent), bytes_of(inputs[group.rank - 1]))
            wrong += [f"{what} of {name}{list(shape)}" for what, (ours, wanted) in got.items() if ours != wanted]
    return wrong


def moved_dtypes():
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    return [name for name in names if echelon.simulate(try_all, 1, (getattr(torch, name),)).results[0][0]]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_dtype_and_shape_is_moved_bit_for_bit(pool, world_size):
    names = moved_dtypes()
    assert len(names) >= 26
    for wrong in (
        *echelon.simulate(move_everything, world_size, (names,)).results,
        *pool.run(move_everything, world_size, names, backend="shm"),
        *pool.run(move_everything, world_size, names, backend="tcp"),
    ):
        assert wrong == []


@pytest.mark.parametrize("name", ["uint4", "int2"])
def test_what_torch_itself_cannot_copy_is_refused(name):
    def act(group):
        group.broadcast(torch.empty(2, dtype=getattr(torch, name)))

    with pytest.raises(echelon.UnsupportedOp, match=f"tensors of dtype torch.{name} cannot be sent: convert them"):
        echelon.simulate(act, 1)


def every_view(group):
    """Conjugate, negated, strided, expanded, and requiring a gradient; in and out."""
    wave = torch.tensor([1 + 2j, 3 - 1j])
    conjugate, negated = wave.conj(), torch.tensor([1 - 2j]).conj().imag
    assert conjugate.is_conj()
    assert negated.is_neg()
    size = group.world_size
    got = {
        "all_reduce": group.all_reduce(torch.tensor([1 + 2j]).conj()),
        "negated": group.all_reduce(negated.clone().requires_grad_()),
        "gathered": group.all_gather(conjugate)[:2],
        "expanded": group.all_gather(torch.tensor([7.0]).expand(3)),
        "scattered": group.reduce_scatter(torch.tensor([[1.0]]).expand(size, 2)),
    }
    for rows in (0, 1):
        odd = torch.full((rows, 2), 5.0)[:, 0]  # of no more than one element, a stride that is not 1, and contiguous
        assert odd.is_contiguous()
        moved = [group.broadcast(odd), group.all_gather(odd), group.all_reduce(odd.clone()), group.all_to_all(odd)]
        assert [len(tensor) for tensor in moved[:3]] == [rows, rows * size, rows]
    place = torch.zeros(2 * size, dtype=torch.complex64)
    group.all_gather(wave, out=place.conj())
    got["out"] = place[:2]
    part = torch.zeros(2, dtype=torch.complex64)
    group.scatter(torch.stack([wave] * size).flatten() if group.rank == 0 else None, 0, out=part.conj())
    assert torch.equal(part, wave.conj())
    whole = wave.clone()
    group.all_reduce(whole.conj())
    got["in place"] = whole
    return {name: value.detach().resolve_conj().tolist() for name, value in got.items()}


@pytest.mark.parametrize("backend", ["simulated", "shm", "tcp"])
def test_views_give_what_their_values_do(pool, backend):
    results = (
        echelon.simulate(every_view, 2).results if backend == "simulated" else pool.run(every_view, 2, backend=backend)
    )
    for got in results:
        assert got == {
            "all_reduce": [2 - 4j],
            "negated": [4.0],
            "gathered": [1 - 2j, 3 + 1j],
            "expanded": [7.0] * 6,
            "scattered": [[2.0, 2.0]],
            "out": [1 - 2j, 3 + 1j],
            "in place": [2 + 4j, 6 - 2j],
        }


def write_expanded(group):
    messages = []
    for act in (
        lambda: group.all_reduce(torch.ones(1).expand(3)),
        lambda: group.reduce(torch.ones(1).expand(3), 0),
    ):
        try:
            act()
        except echelon.UnsupportedOp as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_written_in_place_is_refused():
    messages = echelon.simulate(write_expanded, 1).results[0]
    assert len(messages) == 2
    assert all("writes the tensor in place, but its elements share memory: call .clone() first" in m for m in messages)


def edges(dtype, count, seed):
    """Returns bits of any kind for 16-bit floats, many of them NaN. Else numbers, infinities or zeros of both signs."""
    if dtype.itemsize == 2:
        return sample(dtype, (count,), seed)
    numbers = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    if dtype.is_complex:
        numbers[seed::5] = complex(1.0, math.inf)  # of which torch makes a NaN if it is the second of two
        return numbers
    return torch.where(numbers < 0, torch.copysign(torch.zeros(1), -numbers), 0.0)


def reduced_with_other_strides(group, spreads):
    """Returns the bits of reductions, to which rank 0 gives tensors with strides if `spreads`."""
    whole, own = {}, {}
    cases = [(torch.complex64, "product"), (torch.complex64, "sum"), (torch.float32, "min"), (torch.float32, "max")]
    cases += [(dtype, op) for dtype in (torch.bfloat16, torch.float16) for op in ("sum", "mean", "max")]
    for dtype, op in cases:
        for count in (130, 60_000):

            def given(dtype=dtype, count=count):
                values = edges(dtype, count, group.rank)
                return torch.stack([values, values], 1)[:, 0] if spreads and group.rank == 0 else values

            name = f"{op} of {count} {dtype}"
            whole[name] = digest(group.all_reduce(given(), op))
            own[name] = digest(group.reduce(given(), 0, op)), digest(group.reduce_scatter(given(), op))
    return whole, own


def test_strides_on_one_rank_change_no_bit_of_a_reduction(on_backend):
    """torch computes elements with strides one by one. Their NaN, zeros and complex products had other bits."""
    plain, spread = (on_backend(reduced_with_other_strides, 2, spreads) for spreads in (False, True))
    assert plain[0][0] == plain[1][0]
    assert spread == plain


def infinite_sums(group):
    values = edges(torch.complex64, 130, group.rank)
    return digest(group.all_reduce(values.clone())), digest(group.reduce_scatter(values))


def test_complex_infinities_over_tcp_are_combined_in_the_order_of_the_plan(pool):
    """Only there does the order of two operands show: a + b is not b + a."""
    assert pool.run(infinite_sums, 3, backend="tcp") == echelon.simulate(infinite_sums, 3, order="tcp").results
