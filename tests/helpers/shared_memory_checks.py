"""What ranks do in the tests of shared memory: functions that their processes can import."""

import contextlib
import gc
import os
from array import array

import torch

import echelon
from echelon.backends.formats import memory_layout
from echelon.backends.shared.collectives import exchange, moving, reducing, streaming

KIB = 1 << 10
SIZES = (0, 1, 64 * KIB, 64 * KIB + 1, 256 * KIB, 256 * KIB + 1, 300 * KIB + 7, 1600 * KIB)
"""Numbers of float32: around the limits of what is done at once, and some pieces."""


def values(rank, size, dtype=torch.float32):
    """Returns what `rank` has: small whole numbers, so that every order of additions gives the same."""
    return ((torch.arange(size) * (rank + 3)) % 13 - 5 * (dtype != torch.uint8)).to(dtype)


def check_reducing(group):
    """Compares what combines with the same done here."""
    ranks = range(group.world_size)
    for size in SIZES:
        stack = torch.stack([values(rank, size) for rank in ranks])
        for op, expected in (("sum", stack.sum(0)), ("mean", stack.mean(0)), ("max", stack.amax(0))):
            got = group.all_reduce(values(group.rank, size), op)
            assert torch.equal(got, expected), f"all_reduce({op}) of {size}"
        for dst in {0, group.world_size - 1}:
            got = group.reduce(values(group.rank, size), dst)
            assert torch.equal(got, stack.sum(0) if group.rank == dst else values(group.rank, size)), f"reduce {size}"
        got = group.reduce_scatter(values(group.rank, size).reshape(-1, 1))
        expected = stack.sum(0).tensor_split(group.world_size)[group.rank].reshape(-1, 1)
        assert torch.equal(got, expected), f"reduce_scatter of {size}"
    strided = values(group.rank, 400_000).reshape(400, 1000)
    group.all_reduce(strided[:, ::2])
    expected = values(group.rank, 400_000).reshape(400, 1000)
    expected[:, ::2] = sum(values(rank, 400_000).reshape(400, 1000)[:, ::2] for rank in ranks)
    assert torch.equal(strided, expected)
    return group.backend.name


def check_dtypes(group):
    """Compares sums of every dtype that can be added, small and large."""
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.complex64)
    for dtype in dtypes:
        for size in (5, 100_000, 700_000):
            wide = torch.float64 if dtype.is_floating_point else dtype
            expected = sum(values(rank, size, dtype).to(wide) for rank in range(group.world_size)).to(dtype)
            assert torch.equal(group.all_reduce(values(group.rank, size, dtype)), expected), f"{dtype} {size}"
            for dst in range(group.world_size):
                got = group.reduce(values(group.rank, size, dtype), dst)
                assert torch.equal(got, expected if group.rank == dst else values(group.rank, size, dtype))
            part = expected.tensor_split(group.world_size)[group.rank]
            assert torch.equal(group.reduce_scatter(values(group.rank, size, dtype)), part), f"{dtype} {size}"
    flags = torch.tensor([True, group.rank == 0])
    assert group.all_reduce(flags, "band").tolist() == [True, group.world_size == 1]


def check_moving(group):
    """Compares what moves with the same done here; every rank has another number of rows."""
    rank, count = group.rank, group.world_size
    for size in SIZES:
        for src in {0, count - 1}:
            got = group.broadcast(values(rank, size), src)
            assert torch.equal(got, values(src, size)), f"broadcast of {size} from {src}"
            whole = torch.cat([values(peer, size) for peer in range(count)])
            got = group.scatter(whole.reshape(-1, 1) if rank == src else None, src)
            assert torch.equal(got, whole.tensor_split(count)[rank].reshape(-1, 1)), f"scatter of {size} from {src}"
            got = group.gather(values(rank, size), src)
            assert got is None if rank != src else torch.equal(got, whole), f"gather of {size} to {src}"
        rows = [values(peer, size * peer * 3).reshape(-1, 3) for peer in range(count)]
        assert torch.equal(group.all_gather(rows[rank]), torch.cat(rows)), f"all_gather of {size}"
        splits = [[size // (2 + (src + dst) % 3) for dst in range(count)] for src in range(count)]
        tensors = [values(src, sum(splits[src])) for src in range(count)]
        got = group.all_to_all(tensors[rank], in_splits=splits[rank])
        came = [torch.split(tensors[src], splits[src])[rank] for src in range(count)]
        assert torch.equal(got, torch.cat(came)), f"all_to_all of {size}"
    for dtype in (torch.bool, torch.bfloat16, torch.complex64):
        got = group.all_gather(values(rank, 6).to(dtype).reshape(2, 3))
        assert torch.equal(got, torch.cat([values(peer, 6).to(dtype).reshape(2, 3) for peer in range(count)]))
    assert group.all_gather(torch.empty(rank, 0)).shape == (sum(range(count)), 0)
    assert group.all_gather(torch.tensor(rank)).tolist() == list(range(count))
    strided = torch.zeros(3, 8)
    group.broadcast(strided[:, ::2] if rank else torch.ones(3, 4))
    assert strided.sum() == (12 if rank else 0)


def refuse(*_):
    """Takes the place of a way that is not to be taken."""
    raise AssertionError("it went through the slots, or needed another meeting")


def check_what_stands_beside_the_announcement(group):
    """Tensors of up to 1 MiB a rank do, but for symmetric ones in an all-reduce, and all that many ranks reduce."""
    rank, count, size = group.rank, group.world_size, 256 * KIB
    streaming.play = exchange.exit_barrier = refuse
    symmetric = group.empty(size)
    check_moves_of_1_mib(group, symmetric.copy_(values(rank, size)))
    check_moves_of_1_mib(group, values(rank, size))
    total = sum(values(peer, size) for peer in range(count))
    if count == 2:
        assert torch.equal(group.all_reduce(values(rank, size)), total)
    reducing.meet_with = refuse
    for own in (values(rank, size), symmetric):
        for dst in range(count):
            assert torch.equal(group.reduce(own, dst), total if rank == dst else values(rank, size))
            own.copy_(values(rank, size))
        if count == 2:
            assert torch.equal(group.reduce_scatter(own), total.tensor_split(count)[rank])


def check_moves_of_1_mib(group, own):
    """Moves the values of this rank in every way."""
    rank, count, size = group.rank, group.world_size, len(own)
    whole = torch.cat([values(peer, size) for peer in range(count)])
    assert torch.equal(group.all_gather(own), whole)
    assert torch.equal(group.broadcast(own if rank == 1 else torch.empty(size), 1), values(1, size))
    for root in range(count):
        got = group.gather(own, root)
        assert got is None if rank != root else torch.equal(got, whole)
        assert torch.equal(
            group.scatter(own if rank == root else None, root), values(root, size).tensor_split(count)[rank]
        )
    came = torch.cat([values(peer, size).tensor_split(count)[rank] for peer in range(count)])
    assert torch.equal(group.all_to_all(own), came)


def check_out_beside_the_input(group):
    """`out` may be memory of the tensor's own storage, of the tensor itself, or apart from it."""
    rank, count = group.rank, group.world_size
    mine = [values(peer, count) for peer in range(count)]
    came = torch.stack([values[rank] for values in mine])
    both = torch.cat([mine[rank], torch.zeros(count)])
    assert group.all_to_all(both[:count], both[count:]).data_ptr() == both[count:].data_ptr()
    assert torch.equal(both, torch.cat([mine[rank], came]))
    assert torch.equal(group.all_to_all(both[:count], both[:count]), came)
    assert torch.equal(both[:count], came)
    strided = torch.stack([mine[rank], mine[rank]], 1)
    assert torch.equal(group.all_to_all(strided[:, 0], strided.view(-1)[:count]), came)
    shared = torch.cat([values(peer, 3) if peer == rank else torch.zeros(3) for peer in range(count)])
    assert torch.equal(
        group.all_gather(shared[3 * rank : 3 * rank + 3], shared), torch.cat([values(peer, 3) for peer in range(count)])
    )


def check_own_blocks_stay(group):
    """Counts the pieces that pass through the slots: none with what a rank has for itself."""
    rank, count = group.rank, group.world_size
    numbers = []

    play = streaming.play

    def count_pieces(shared, call, program, *tensors):
        words = array("Q", program)
        numbers.append(list(words[1 : 1 + 5 * words[0] : 5]).count(streaming._TICKS) // 2)
        return play(shared, call, program, *tensors)

    streaming.play = count_pieces
    num_slots = 12 if count == 2 else 3
    size = num_slots * memory_layout.slot_bytes(count) // 4  # of float32: so many slots full, and over 1 MiB
    whole = values(rank, count * size)
    all_values = [values(peer, count * size) for peer in range(count)]
    expected = torch.cat([each.tensor_split(count)[rank] for each in all_values])
    assert torch.equal(group.all_to_all(whole), expected)
    assert torch.equal(group.scatter(whole if rank == 1 else None, 1), all_values[1].tensor_split(count)[rank])
    for out in (None, whole.tensor_split(count)[rank]):
        assert torch.equal(group.reduce_scatter(whole, out=out), sum(all_values).tensor_split(count)[rank])
    assert numbers == [num_slots * (count - 1)] * 4
    numbers.clear()
    mine = values(rank, size)
    splits = [size * (peer == rank) for peer in range(count)]
    assert torch.equal(group.all_to_all(mine, in_splits=splits), mine)
    got = group.gather(mine if rank == 0 else mine[:0], 0)
    assert got is None if rank else torch.equal(got, mine)
    assert not numbers  # what others read is so little that it stands beside the announcements
    streaming.play = play


def new_values(group, size, dtype=torch.float32):
    """Returns what this rank has, in memory that all share."""
    tensor = group.empty(size, dtype)
    assert tensor.shape == (size,)
    assert tensor.dtype == dtype
    return tensor.copy_(values(group.rank, size, dtype))


def check_symmetric(group):
    """Compares operations on shared tensors, and on parts of them, with the same done here."""
    rank, count = group.rank, group.world_size
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for size in (3, 70_000 * 4, 999_999):
            stack = torch.stack([values(peer, size, dtype) for peer in range(count)])
            total = stack.double().sum(0).to(dtype)
            assert torch.equal(group.all_reduce(new_values(group, size, dtype)), total)
            part = group.all_reduce(new_values(group, size + 100, dtype)[40:-60], "max")
            assert torch.equal(
                part, torch.stack([values(peer, size + 100, dtype) for peer in range(count)]).amax(0)[40:-60]
            )
            assert torch.equal(
                group.broadcast(new_values(group, size, dtype), count - 1), values(count - 1, size, dtype)
            )
            own = new_values(group, size, dtype)
            assert torch.equal(group.reduce_scatter(own), total.tensor_split(count)[rank])
            assert torch.equal(own, values(rank, size, dtype))
            assert torch.equal(group.reduce(own, 0), total if rank == 0 else values(rank, size, dtype))
    if count > 1:
        mean = group.all_reduce(new_values(group, 500_000), "mean")
        assert torch.equal(mean, torch.stack([values(peer, 500_000) for peer in range(count)]).mean(0))
    assert group.empty((2, 0, 3)).shape == (2, 0, 3)
    assert group.empty(7, torch.bool).dtype == torch.bool


def check_nothing_is_copied_twice(group):
    """Large operations on shared tensors, of one block or of several, are done without the slots."""
    rank, count = group.rank, group.world_size
    streaming.play = refuse
    size = 300_000
    tensors = [new_values(group, count * size) for _ in range(2)]
    own = tensors[rank % 2]
    all_values = [values(peer, count * size) for peer in range(count)]
    total = sum(all_values)
    for src in range(count):
        place = torch.empty(size)
        got = group.scatter(own if rank == src else None, src, out=place)
        assert got.data_ptr() == place.data_ptr()
        assert torch.equal(place, all_values[src].tensor_split(count)[rank])
        place = torch.empty(count * count * size)
        got = group.gather(own, src, out=place)
        assert got is None if rank != src else torch.equal(place, torch.cat(all_values))
        copy = own.clone() if rank == src else own
        assert torch.equal(group.broadcast(own if rank == src else torch.empty(count * size), src), all_values[src])
        assert torch.equal(own, copy)
    assert torch.equal(group.all_gather(own), torch.cat(all_values))
    few = own[: (rank + 1) * 280_000]
    rows = [mine[: (peer + 1) * 280_000] for peer, mine in enumerate(all_values)]
    assert torch.equal(group.all_gather(few), torch.cat(rows))
    came = [mine.tensor_split(count)[rank] for mine in all_values]
    assert torch.equal(group.all_to_all(own), torch.cat(came))
    assert torch.equal(group.reduce_scatter(own), total.tensor_split(count)[rank])
    assert torch.equal(group.reduce(own, 0), total if rank == 0 else values(rank, count * size))
    own.copy_(values(rank, count * size))
    assert torch.equal(group.all_reduce(own), total)
    for _ in range(70):  # more blocks than a rank can say that it has; of that of its own tensor it need not
        group.empty(1)
    assert torch.equal(group.all_reduce(tensors[0].copy_(values(rank, count * size))), total)


def go_on_without_a_block(group):
    """One rank has let go of its part of the block that the others' tensors are in: it goes through the slots."""
    rank, count = group.rank, group.world_size
    size = 300_000
    tensor = new_values(group, size)
    if rank == 1:
        tensor = None
        gc.collect()
    group.barrier()
    got = group.scatter(tensor if rank == 0 else None, 0)
    assert torch.equal(got, values(0, size).tensor_split(count)[rank])
    got = group.all_gather(values(rank, size) if tensor is None else tensor)
    assert torch.equal(got, torch.cat([values(peer, size) for peer in range(count)]))
    for _ in range(70):  # more blocks than a rank can say that it has
        other = group.empty(10)
    again = new_values(group, size)
    assert torch.equal(group.broadcast(tensor if rank == 0 else again, 0), values(0, size))
    total = values(0, size) * count
    assert torch.equal(group.all_reduce(again if rank else tensor), total)
    return other.numel()


def check_mixed(group):
    """One rank passes a shared tensor, others ordinary ones, or shared ones of another block: it works all the same."""
    for size in (200_000, 400_000):
        expected = sum(values(rank, size) for rank in range(group.world_size))
        first, second = new_values(group, size), new_values(group, size)
        tensors = [values(0, size), first, second]
        assert torch.equal(group.all_reduce(tensors[group.rank % 3]), expected)
        again = new_values(group, 2 * size)
        view = again[group.rank * 1000 : group.rank * 1000 + size].copy_(values(group.rank, size))
        assert torch.equal(group.all_reduce(view), expected)


def shared_kib():
    """Returns how much shared memory this process has in its mappings, in KiB."""
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        total = 0
        for line in lines:
            if "memfd:echelon" in line:
                total += next(int(other.split()[1]) for other in lines if other.startswith("Rss:"))
    return total


def check_freed(group):
    """Returns the memory of the segment before, with and after a tensor; others go on with theirs."""
    group.barrier()
    before = shared_kib()
    tensor = group.empty(4 << 20).fill_(1.0)
    group.all_reduce(tensor)
    during = shared_kib()
    kept = tensor[:10] if group.rank == 0 else None
    del tensor
    still = shared_kib()
    other = group.empty(1 << 20).fill_(2.0)
    group.all_reduce(other)
    assert other.sum() == group.world_size * 2.0 * (1 << 20)
    del other
    del kept
    return before, during, still, shared_kib()


def check_dropped_groups(group):
    """Returns by how many bytes groups that have ended let the shared file grow. The first rank drops its own last."""
    group.barrier()
    before = _file_bytes(group)
    for _ in range(3):
        part = group.subgroup(range(group.world_size))
        part.all_reduce(torch.ones(1 << 20))
        if group.rank:
            part = None
        group.barrier()
        part = None
    group.barrier()
    return _file_bytes(group) - before


def _file_bytes(group):
    return 512 * os.fstat(group.backend.segment.fd).st_blocks


def drop_in_a_child(group):
    """A forked child lets go of the tensor; the parent's is as it was."""
    tensor = group.empty(1 << 18).fill_(3.0)
    pid = os.fork()
    if pid == 0:
        del tensor
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    return tensor.sum().item()


def keep_after_close(group):
    """A tensor outlives its group."""
    tensor = group.empty(1 << 18).fill_(4.0)
    group.close()
    gc.collect()
    return tensor.sum().item()


def disagree_on_shape(group):
    try:
        group.empty(100 + group.rank)
    except echelon.CollectiveMismatch as error:
        return str(error)
    return "nothing"


def close_in_turn(group):
    """Rank 1 closes when rank 0 has: the end of rank 0 ends its receive."""
    group.empty(100 + group.rank)
    if group.rank == 1:
        with contextlib.suppress(echelon.PeerFailed):
            group.recv(0)


def show_more_than_there_is(group):
    """Rank 1 says that it has fewer rows than it shows; returns what a rank is told."""
    if group.rank == 1:
        moving._rows = lambda rows: exchange.Shown(rows, (rows.nbytes,), (len(rows) - 1,))
    try:
        group.all_gather(values(group.rank, 10))
    except echelon.EchelonError as error:
        return str(error)
    return "nothing"
