"""What simulated ranks do with the native library's boards: each scenario adds programs to an explorer's host."""

import random
from functools import partial

import torch

from echelon._native import Act, Target
from echelon.backends.formats import memory_layout
from echelon.backends.operators import operator
from echelon.backends.shared.collectives import exchange, streaming
from echelon.backends.shared.collectives.native_calls import NativeCalls, Way
from echelon.backends.shared.collectives.rank_region import RankRegions, Shared
from echelon.errors import CollectiveMismatch
from echelon.operation_records import FlightRecorder, KnownOperation
from tests.helpers.collective_calls import call_of
from tests.helpers.native_explorer import GaveUp, Race, boards
from tests.helpers.task_host import Chance, Stuck

SUM = 0
WRONG = (Race, Stuck, AssertionError)
"""What a mistake of the protocol ends in."""
NUM_OPERATIONS = 5


def add_all(explorer, blocks, program):
    """Has every rank run `program(board)`. It ends with the error of an access, if there was one."""

    def run(board):
        try:
            program(board)
        finally:
            explorer.check()

    for board in blocks:
        explorer.host.add(board.rank, lambda board=board: run(board))


def reduced(number, ranks, length):
    return torch.stack([values(number, rank, length) for rank in ranks]).sum(0)


def values(number, rank, length):
    return torch.arange(length, dtype=torch.float32) + 10 * number + rank


def all_reduces(explorer, blocks, seed):
    """All ranks reduce tensors of two shapes, whose notes take turns in a way of their own."""
    chance = random.Random(f"all-reduces {seed}")
    lengths = [chance.choice((1, 3)) for _ in range(NUM_OPERATIONS)]

    def program(board):
        for number, length in enumerate(lengths, 1):
            tensor = values(number, board.rank, length)
            assert board.all_reduce(call_of(number, f"all_reduce of {length}"), SUM, tensor.nbytes, tensor)
            explorer.check()
            assert torch.equal(tensor, reduced(number, range(len(blocks)), length)), f"#{number}: {tensor}"

    add_all(explorer, blocks, program)


def broadcasts(explorer, blocks, seed):
    """The ranks are sources in turn, or all operations have one source, which may be far ahead of its readers."""

    def program(board):
        for number in range(1, NUM_OPERATIONS + 1):
            source = (number + seed) % len(blocks) if seed % 2 else seed // 2 % len(blocks)
            tensor = values(number, board.rank, 2)
            assert board.broadcast(call_of(number, "broadcast"), source, tensor.nbytes, tensor)
            explorer.check()
            assert torch.equal(tensor, values(number, source, 2)), f"#{number}: {tensor}"

    add_all(explorer, blocks, program)


def reductions(explorer, blocks, seed):
    """Parts go to one rank, or each rank reduces its own."""

    def program(board):
        count, rank = len(blocks), board.rank
        for number in range(1, NUM_OPERATIONS + 1):
            tensor = values(number, rank, 2 * count)
            total = reduced(number, range(count), 2 * count)
            call = call_of(number, "reduction")
            if (number + seed) % 2:
                dst = number % count
                shown, out = (0, tensor) if rank == dst else (tensor.nbytes, None)
                assert board.reduce(call, SUM, shown, tensor, 0, out)
                want = total if rank == dst else values(number, rank, 2 * count)
                got = tensor
            else:
                got, want = torch.empty(2), total[2 * rank : 2 * rank + 2]
                assert board.reduce(call, SUM, tensor.nbytes, tensor, 8 * rank, got)
            explorer.check()
            assert torch.equal(got, want), f"#{number}: {got}"

    add_all(explorer, blocks, program)


def exchanges(explorer, blocks, seed):
    """Every rank sends every rank a block. In one operation rank 1 has other blocks than the others expect."""
    count = len(blocks)
    changed = seed % NUM_OPERATIONS + 1

    def block(number, rank, peer):
        return torch.full((2,), 100.0 * number + 10 * rank + peer)

    def program(board):
        rank = board.rank
        heads = [exchange._head((8,) * count, (1,) * count, owner, 1 << 20) for owner in range(count)]
        for number in range(1, NUM_OPERATIONS + 1):
            own = torch.cat([block(number, rank, peer) for peer in range(count)])
            got = torch.zeros(2 * count)
            known = list(heads)
            if number == changed and rank == 1:
                known[1] = exchange._head((8,) * count, (2,) * count, 1, 1 << 20)
            plan = exchange._known(rank, known, range(count), rank, True).plan
            done = board.exchange(call_of(number, "exchange"), plan, own.data_ptr(), got.data_ptr())
            explorer.check()
            assert done == (number != changed or rank == 1), f"#{number} on rank {rank}: {done}"
            want = torch.cat([block(number, owner, rank) for owner in range(count)])
            assert torch.equal(got, want if done else torch.zeros(2 * count)), f"#{number}: {got}"

    add_all(explorer, blocks, program)


def ticks(explorer, blocks, seed):
    """All ranks announce numbers, and count the steps of the operations."""
    del seed

    def program(board):
        for number in range(1, NUM_OPERATIONS):
            call = call_of(number, "meeting")
            board.meet(call, [number, board.rank])
            explorer.check()
            for rank in range(len(blocks)):
                assert [board.word(rank, index) for index in range(2)] == [number, rank]
            for step in range(1, 3):
                board.tick()
                board.wait_for_all(step, call)
                explorer.check()
                state = board._state
                for peer in board._peers:
                    done = board._words[peer * memory_layout.ROOM_BYTES // 8]
                    assert done >= state.announced + 1 + step, f"#{number}: rank {peer} has done {done} steps"

    add_all(explorer, blocks, program)


MULTIPLIER = 0x85EBCA6B


def known_calls(explorer, blocks, seed):
    """Ranks repeat calls that the library runs by itself, or begins. Some forget them, and one has other work first."""
    chance = random.Random(f"known calls {seed}")
    calls = [chance.choice(("flat", "tall", "broadcast", "barrier", "exchange", "new")) for _ in range(NUM_OPERATIONS)]
    forgets = [(chance.randrange(len(blocks)), chance.randrange(NUM_OPERATIONS)) for _ in range(2)]
    count, source = len(blocks), seed % len(blocks)
    heads = [exchange._head((8,) * count, (1,) * count, owner, 1 << 20) for owner in range(count)]

    def program(board):
        known, recorder = NativeCalls(), FlightRecorder()
        known.record_into(recorder, 1)
        known.open(board)
        plan = exchange._known(board.rank, heads, range(count), board.rank, True).plan
        out = torch.zeros(2 * count)
        sums = Way(Act.REDUCES, Target.IN_PLACE, SUM, 8, changes_tensor=True)
        swaps = Way(Act.EXCHANGES, plan=plan, makes_result=True)
        ways = {
            "flat": ("all_reduce", sums, torch.zeros(2), None),
            "tall": ("all_reduce", sums, torch.zeros(2, 1), None),
            "broadcast": ("broadcast", Way(Act.RECEIVES, source=source, changes_tensor=True), torch.zeros(2), None),
            "barrier": ("barrier", Way(Act.MEETS_ONLY), None, None),
            "exchange": ("exchange", swaps, torch.zeros(2 * count), out),
            "new": ("exchange", swaps, torch.zeros(2 * count), None),
        }
        checksums = {name: number for number, name in enumerate(ways)}

        def learn():
            known.forget()
            for name, (kind, way, tensor, result) in ways.items():
                run = partial(print, name)
                known.expect(run, lambda way=way: way)
                call = KnownOperation("group", 1, name, 8)
                assert known.learn(run, call, checksums[name], (kind, -1, "sum"), tensor, result, out)

        signature = 0
        for number, name in enumerate(calls, 1):
            if number == 1 or (board.rank, number) in forgets:
                learn()
            kind, _, tensor, result = ways[name]
            known.numbers.num_marks = 1
            assert known.run(kind, -1, "sum", tensor, result) is False
            known.numbers.num_marks = 0
            if tensor is not None:
                tensor.copy_(values(number, board.rank, tensor.numel()).view(tensor.shape))
            done = known.run(kind, -1, "sum", tensor, result)
            explorer.check()
            signature = (signature * MULTIPLIER + checksums[name]) & 0xFFFFFFFF
            assert known.numbers.signature == signature
            assert done is not False
            if name == "new":
                result = done[0] if len(done) == 1 else torch.zeros(2 * count)
                done = len(done) == 1 or done
            if done is not True:
                assert (done[0].operation, *done[1:]) == (name, number, signature)
                go_on(board, call_of(number, name, signature), kind, tensor, result, plan, source)
                explorer.check()
                known.numbers.left = number
            if kind == "all_reduce":
                assert torch.equal(tensor.view(2), reduced(number, range(count), 2)), f"#{number}: {tensor}"
            elif kind == "broadcast":
                assert torch.equal(tensor, values(number, source, 2)), f"#{number}: {tensor}"
            elif kind == "exchange":
                mine = slice(2 * board.rank, 2 * board.rank + 2)
                want = torch.cat([values(number, owner, 2 * count)[mine] for owner in range(count)])
                assert torch.equal(result, want), f"#{number}: {result}"
            recorded = [record.sequence for record in recorder.records()]
            assert (number in recorded) == (done is True)
            latest = recorder.latest(1)
            assert done is not True or (latest is not None and latest.sequence == number)

    add_all(explorer, blocks, program)


def go_on(board, call, kind, tensor, out, plan, source):
    """Makes a call as the group's runner does, after the library has begun it."""
    if kind == "all_reduce":
        assert board.all_reduce(call, SUM, tensor.nbytes, tensor)
    elif kind == "broadcast":
        assert board.broadcast(call, source, tensor.nbytes, tensor)
    elif kind == "exchange":
        assert board.exchange(call, plan, tensor.data_ptr(), out.data_ptr())
    else:
        board.meet(call)


def programs(explorer, blocks, seed):
    """Ranks play large operations through slots of 64 bytes; some reductions are Python's."""
    count = len(blocks)
    chance = random.Random(f"programs {seed}")
    kinds = [chance.choice(("pieces", "to one", "parts", "shares", "moves")) for _ in range(3)]
    ops = [operator(chance.choice(("sum", "product")), torch.float64) for _ in kinds]
    lengths = [150 * count if kind == "shares" else chance.choice((40, 44, 52)) for kind in kinds]

    def program(board):
        rank = board.rank
        rooms = RankRegions(explorer.window, count, rank)
        shared = Shared(rank, count, board, rooms, None, None)
        for number, (kind, op, length) in enumerate(zip(kinds, ops, lengths, strict=True), 1):
            own = values(number, rank, length).double()
            whole = torch.stack([values(number, peer, length) for peer in range(count)]).double()
            total = whole.sum(0) if op.name == "sum" else whole.prod(0)
            call = call_of(number, kind)
            board.meet(call)
            explorer.check()
            target, want = own, total
            if kind in ("pieces", "to one"):
                readers = tuple(range(count)) if kind == "pieces" else (number % count,)
                made = streaming.pieces(rank, count, 64, own.nbytes, 8, readers)
                want = total if rank in readers else own.clone()
            elif kind == "parts":
                made = streaming.parts(rank, count, 64, own.nbytes, 8)
            elif kind == "shares":
                sizes = tuple(part.nbytes for part in own.tensor_split(count))
                made = streaming.shares(rank, 1024, sizes, 8)
                target, want = torch.zeros(sizes[rank] // 8).double(), total.tensor_split(count)[rank]
            else:
                source = number % count
                shown, wanted = ((0, 0, own.nbytes),), ((source, 0, 0, own.nbytes),)
                made = streaming.moves(
                    rank, 64, 1, own.nbytes, shown if rank == source else (), () if rank == source else wanted
                )
                target, want = own if rank == source else torch.zeros(length).double(), whole[source]
            streaming.play(shared, call, made, own, target, op)
            explorer.check()
            assert torch.equal(target, want), f"#{number}, {kind}({op.name}): {target}"

    add_all(explorer, blocks, program)


def disagreements(explorer, blocks, seed):
    """The last operation of rank 1 is another one, by its note or by its number. Both sides are told."""
    told = []

    def program(board):
        for number in range(1, 4):
            last = number == 3 and board.rank == 1
            note = "all_reduce of 7" if last and seed % 2 else "all_reduce"
            tensor = values(number, board.rank, 2)
            call = call_of(number, note, signature=8 if last and not seed % 2 else 7)
            try:
                board.all_reduce(call, SUM, tensor.nbytes, tensor)
            except CollectiveMismatch as mismatch:
                told.append((board.rank, number, str(mismatch)))
            explorer.check()
        found = [(number, "in all_reduce" in text) for rank, number, text in told if rank == board.rank]
        assert found == [(3, True)], f"rank {board.rank} was told {found}"

    add_all(explorer, blocks, program)


def withdrawals(explorer, blocks, seed):
    """Rank 0 announces its third operation and gives it up. The others meet it, or learn that, and find no mismatch."""
    del seed

    def program(board):
        for number in range(1, 4):
            call = call_of(number, "all_reduce")
            tensor = values(number, board.rank, 2)
            if number == 3 and board.rank == 0:
                wait_once(explorer, board, call, tensor)
                return
            try:
                board.all_reduce(call, SUM, tensor.nbytes, tensor)
            except GaveUp:
                return
            explorer.check()
            assert torch.equal(tensor, reduced(number, range(len(blocks)), 2)), f"#{number}: {tensor}"

    add_all(explorer, blocks, program)


def wait_once(explorer, board, call, tensor):
    """Gives up an operation at the first sleep, as at a timeout: withdraws it, then tells the others."""

    def leave(*_):
        raise GaveUp

    board._look_around = leave
    explorer.impatient.add(board.rank)
    try:
        board.all_reduce(call, SUM, tensor.nbytes, tensor)
    except GaveUp:
        explorer.check()
        board.withdraw(call)
        explorer.give_up(board.rank)


ALL = {
    "all-reduces": (all_reduces, 2, {}),
    "all-reduces, crowded": (all_reduces, 2, {"crowded": True}),
    "all-reduces of three": (all_reduces, 3, {"crowded": True}),
    "broadcasts": (broadcasts, 2, {}),
    "broadcasts of three": (broadcasts, 3, {}),
    "reductions": (reductions, 2, {}),
    "reductions of three": (reductions, 3, {"crowded": True}),
    "exchanges": (exchanges, 2, {}),
    "exchanges of three": (exchanges, 3, {}),
    "known calls": (known_calls, 2, {}),
    "known calls of three": (known_calls, 3, {"crowded": True}),
    "programs": (programs, 2, {}),
    "programs of three": (programs, 3, {"crowded": True}),
    "ticks": (ticks, 2, {}),
    "disagreements": (disagreements, 2, {}),
    "withdrawals": (withdrawals, 2, {}),
}


def play(path, name, seed, order=None):
    """Plays a scenario in an order by chance, with loads that are stale by chance; returns the explorer."""
    scenario, num_ranks, settings = ALL[name]
    chance = random.Random(f"stale {seed}")
    staleness = chance.choice((0.0, 0.2, 0.7))

    def stale(count):
        return chance.randrange(count) if count > 1 and chance.random() < staleness else 0

    with boards(path, order or Chance(seed), num_ranks, stale=stale, **settings) as (explorer, blocks):
        scenario(explorer, blocks, seed)
        explorer.host.run()
    return explorer
