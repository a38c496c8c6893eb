"""Checks of recorded roles before anything is played: mismatches, deadlocks, and reductions in a narrow type. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from echelon.errors import CollectiveMismatch, DeadlockError
from echelon.foresight.trace import (
    Collective,
    Communication,
    Entry,
    Group,
    HostWait,
    Message,
    RecordEvent,
    Trace,
    Wait,
    WaitEvent,
)
from echelon.wording import counted, listed

_SAVES = ("torch.distributed.checkpoint.", "Store.save ")
"""Beginnings of the names of saves that all ranks of a group make together."""
_OF_FSDP1 = "MixedPrecision(reduce_dtype=torch.float32)"
_OF_FSDP2 = "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
_NARROW = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})


class Problem(NamedTuple):
    """Problem of a program that runs in spite of it."""

    kind: str
    """Such as "narrow reduction"."""
    text: str
    """Sentence with the line and a remedy."""

    def __str__(self) -> str:
        return self.text


def check(traces: Mapping[int, Trace], classes: Sequence[int]) -> list[Problem]:
    """Checks the recorded steps of all roles, with the communication of the program before them.

    Returns the problems that do not keep the program from running.

    Args:
        traces: recorded ranks.
        classes: the role of each rank, as the rank that was recorded for it.

    Raises:
        CollectiveMismatch: two ranks of a group call different collectives, or a message has no partner. It names the
            lines.
        DeadlockError: recorded ranks wait for each other for ever. It names a line for each.
        RuntimeError: NCCL communicates between ranks of a host that use one GPU.
    """
    # By their roles ranks that are not recorded are compared as well, but only within the step.
    check_collectives(traces, classes)
    whole = {rank: replace(trace, entries=trace.earlier + trace.entries) for rank, trace in traces.items()}
    check_collectives(whole)
    check_messages(whole)
    check_order(whole)
    check_gpus(traces)
    return [*saves_of_some_ranks(traces), *narrow_reductions(traces)]


# GPUs


def check_gpus(traces: Mapping[int, Trace]) -> None:
    """Compares the GPUs of ranks that have different numbers on their hosts.

    Raises:
        RuntimeError: two of them use cuda:0, and NCCL communicates their tensors.
    """
    found = dict(sorted(trace.first_gpu for trace in traces.values() if trace.first_gpu is not None))
    if len(found) > 1:
        first, *_, last = found
        raise RuntimeError(
            f"two ranks of a host use cuda:0, those of LOCAL_RANK {first} and {last} at {found[last]}, which NCCL "
            "refuses as a duplicate GPU: call torch.cuda.set_device(LOCAL_RANK) before the first tensor of a GPU, or "
            "set CUDA_VISIBLE_DEVICES=0 here if the launcher shows each rank its own GPU alone"
        )


# Collectives


def check_collectives(traces: Mapping[int, Trace], classes: Sequence[int] = ()) -> None:
    """Compares the collectives of each group on its recorded members.

    A member that is not recorded is represented by its role, in the role's group of the same form. Without `classes`,
    recorded members alone are compared: ranks of a role do the same in a step, but not necessarily before it.

    Raises:
        CollectiveMismatch: they differ in kind, bytes, dtype, reduction, root or order.
    """
    calls = {rank: _by_group(trace) for rank, trace in traces.items()}
    for rank in sorted(traces):
        for group, own in calls[rank].items():
            seen = {rank}
            for member in group.ranks:
                if member not in traces and not classes:
                    continue
                other = member if member in traces else classes[member]
                # The lower rank has compared this pair already.
                if other in seen or (member in traces and member < rank and group in calls[member]):
                    continue
                seen.add(other)
                shifted = group._replace(ranks=tuple(each + other - member for each in group.ranks))
                theirs = calls[other].get(shifted)
                if theirs is None:
                    if member not in traces:
                        continue  # the role has no group of this form
                    theirs = []
                counted_from = "of a step" if classes else "of the program"
                _compare(_Side(rank, traces[rank], own), _Side(other, traces[other], theirs), group, counted_from)


def _by_group(trace: Trace) -> dict[Group, list[Collective]]:
    found: dict[Group, list[Collective]] = {}
    for entry in trace.entries:
        if isinstance(entry, Collective) and len(trace.groups[entry.group].ranks) > 1:
            found.setdefault(trace.groups[entry.group], []).append(entry)
    return found


class _Side(NamedTuple):
    rank: int
    trace: Trace
    calls: Sequence[Collective]


_ALIKE = "every rank of a group must call the same collectives in the same order, with tensors of equal size"


def _compare(one: _Side, other: _Side, group: Group, counted_from: str) -> None:
    for number, (mine, theirs) in enumerate(zip_longest(one.calls, other.calls), 1):
        if _signature(one, mine) == _signature(other, theirs):
            continue
        left, right = _described(one, mine), _described(other, theirs)
        parted = _parted(one, other, number - 1)
        advice = _without_step(one.trace, other.trace) or _ALIKE
        raise CollectiveMismatch(
            f"call {number} {counted_from} in {_named(group)} is {left}, but {right}{parted}: {advice}",
            rank=other.rank,
            theirs=right,
        )


def _without_step(one: Trace, other: Trace) -> str:
    """Returns the cause and the fix if one rank has no optimizer, so that it has no step. Empty if both are alike."""
    if one.is_step == other.is_step:
        return ""
    step, whole = (one, other) if one.is_step else (other, one)
    return (
        f"rank {whole.rank} has no optimizer, so all of its program was compared with a step of rank {step.rank}: name "
        "a function that both call once a step by --until (until=)"
    )


def _parted(one: _Side, other: _Side, end: int) -> str:
    """Returns the first lines that differ while the calls still agree, as after an extra call. Empty if none do."""
    for number, (mine, theirs) in enumerate(zip(one.calls[:end], other.calls[:end], strict=True), 1):
        places = [side.trace.places[call.place] for side, call in ((one, mine), (other, theirs)) if call.place >= 0]
        if len(set(places)) == 2:
            sides = f"{places[0]} on rank {one.rank} and {places[1]} on rank {other.rank}"
            return f"; their lines differ from call {number} on, {sides}"
    return ""


def _signature(side: _Side, call: Collective | None) -> object:
    """Returns the facts of a call that must be equal on all ranks of its group."""
    if call is None:
        return None
    root = side.trace.groups[call.group].ranks.index(call.root) if call.root >= 0 else -1
    # The sizes of an all-to-all may differ between ranks.
    return call.kind, 0 if call.kind == "all_to_all" else call.num_bytes, call.dtype, call.op, root


def _described(side: _Side, call: Collective | None) -> str:
    if call is None:
        if not side.calls:
            return f"none on rank {side.rank}"
        return f"none on rank {side.rank}, whose last one was at {side.trace.line(side.calls[-1])}"
    return f"{text_of(side.trace, call)} on rank {side.rank}"


def text_of(trace: Trace, entry: Communication) -> str:
    """Returns an operation with its size, line and module."""
    where = trace.where(entry)
    if isinstance(entry, Message):
        verb = f"send to rank {entry.peer}" if entry.is_send else f"receive from rank {entry.peer}"
        return f"{verb} of {entry.num_bytes:,} bytes of {entry.dtype}, tag {entry.tag}, at {where}"
    op = f"({entry.op})" if entry.op else f" with root {entry.root}" if entry.root >= 0 else ""
    size = f" of {entry.num_bytes:,} bytes of {entry.dtype}" if entry.kind != "barrier" else ""
    return f"{entry.kind}{op}{size} at {where}"


def _named(group: Group) -> str:
    ranks = group.ranks
    if group.name:
        return f"group {group.name!r} of {counted(len(ranks), 'rank')}"
    if len(ranks) > 8:
        return f"the group of ranks {ranks[0]}, {ranks[1]} to {ranks[-1]}"
    return f"the group of ranks {', '.join(map(str, ranks))}"


# Messages


_Route: TypeAlias = tuple[int, int, int, Group]
"""Sender, receiver, tag and group of messages. NCCL sends those of each group by its own connections."""


def _route(trace: Trace, message: Message) -> _Route:
    return *message.ends(trace.rank), message.tag, trace.groups[message.group]


def check_messages(traces: Mapping[int, Trace]) -> None:
    """Pairs the messages between recorded ranks.

    Raises:
        CollectiveMismatch: a message has no partner, or partners differ in size or dtype.
    """
    messages: defaultdict[_Route, tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for trace in traces.values():
        for entry in trace.entries:
            if isinstance(entry, Message) and entry.peer in traces:
                messages[_route(trace, entry)][entry.is_send].append(entry)
    # Sorted, so that a program with several mistakes gives the same error in every run.
    for (src, dst, tag, _), (receives, sends) in sorted(messages.items(), key=itemgetter(0)):
        for send, receive in zip_longest(sends, receives):
            if send is not None and receive is not None:
                if (send.num_bytes, send.dtype) != (receive.num_bytes, receive.dtype):
                    raise CollectiveMismatch(
                        f"{text_of(traces[src], send)} on rank {src} meets {text_of(traces[dst], receive)} on rank "
                        f"{dst}: make both sides agree on size and dtype"
                    )
                continue
            rank, found = (src, send) if send is not None else (dst, receive)
            assert found is not None
            missing = f"rank {dst} receives" if send is not None else f"rank {src} sends"
            fitting = f"nothing that fits it, with tag {tag} in the same group"
            cause = _without_step(traces[src], traces[dst]) or f"{missing} {fitting}"
            raise CollectiveMismatch(f"{text_of(traces[rank], found)} on rank {rank} has no partner: {cause}")


# Order across groups


@dataclass
class _Stream:
    """Queue of one stream of one rank."""

    entries: deque[Entry] = field(default_factory=deque)
    waits_for: Communication | None = None


class _Order:
    """Untimed run of all recorded ranks: each stream goes on as far as its partners let it."""

    def __init__(self, traces: Mapping[int, Trace]) -> None:
        self._traces = traces
        self._streams: dict[tuple[int, int], _Stream] = defaultdict(_Stream)
        self._events: set[tuple[int, int]] = set()
        self._recorded = {
            (rank, entry.event)
            for rank, trace in traces.items()
            for entry in trace.entries
            if isinstance(entry, RecordEvent)
        }
        """Events that are recorded in this step. Others were recorded in an earlier one."""
        self._begun: set[tuple[int, int]] = set()
        """Communication that its stream has reached, by rank and number."""
        self._partners: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._of: dict[tuple[int, int], Communication] = {}
        self._hosts = {rank: deque(trace.entries) for rank, trace in traces.items()}
        self._pair_up()

    def run(self) -> None:
        """Runs all to the end.

        Raises:
            DeadlockError: some cannot go on.
        """
        is_moving = True
        while is_moving:
            is_moving = False
            for rank in sorted(self._hosts):
                is_moving |= self._issue(rank)
            for (rank, _), stream in sorted(self._streams.items()):
                while stream.entries and self._can_pass(rank, stream):
                    stream.entries.popleft()
                    is_moving = True
        if stuck := [key for key, stream in sorted(self._streams.items()) if stream.entries]:
            raise DeadlockError(self._explanation(stuck))

    def _pair_up(self) -> None:
        calls: defaultdict[tuple[Group, int], list[tuple[int, int]]] = defaultdict(list)
        messages: defaultdict[tuple[_Route, bool], list[tuple[int, int]]] = defaultdict(list)
        for rank, trace in self._traces.items():
            counts: defaultdict[Group, int] = defaultdict(int)
            for entry in trace.entries:
                if isinstance(entry, Collective):
                    group = trace.groups[entry.group]
                    calls[group, counts[group]].append((rank, entry.number))
                    counts[group] += 1
                elif isinstance(entry, Message):
                    messages[_route(trace, entry), entry.is_send].append((rank, entry.number))
                else:
                    continue
                self._of[rank, entry.number] = entry
        for members in calls.values():
            self._partners.update((member, members) for member in members)
        for (route, is_send), mine in messages.items():
            # A peer that is not recorded has none, and then holds up nobody.
            theirs = messages.get((route, not is_send), [])
            for one, other in zip(mine, theirs, strict=False):
                self._partners[one] = [one, other]

    def _issue(self, rank: int) -> bool:
        """Advances the host until it waits. Returns whether it has moved."""
        host, has_moved = self._hosts[rank], False
        while host:
            entry = host[0]
            if isinstance(entry, HostWait):
                if not self._host_can_pass(rank, entry):
                    return has_moved
            elif isinstance(entry, Collective | Message | Wait | RecordEvent | WaitEvent):
                self._streams[rank, entry.stream].entries.append(entry)
            host.popleft()
            has_moved = True
        return has_moved

    def _host_can_pass(self, rank: int, entry: HostWait) -> bool:
        if entry.event >= 0:
            return (rank, entry.event) in self._events
        streams = [key for key in self._streams if key[0] == rank and entry.stream in (-1, key[1])]
        return not any(self._streams[key].entries for key in streams)

    def _can_pass(self, rank: int, stream: _Stream) -> bool:
        """Whether a stream can go past its next entry. Notes that the stream has reached that entry."""
        entry = stream.entries[0]
        stream.waits_for = None
        if isinstance(entry, RecordEvent):
            self._events.add((rank, entry.event))
            return True
        if isinstance(entry, WaitEvent):
            return (rank, entry.event) in self._events or (rank, entry.event) not in self._recorded
        if isinstance(entry, Wait):
            return self._is_complete(rank, entry.number, stream)
        assert isinstance(entry, Collective | Message)
        self._begun.add((rank, entry.number))
        return not entry.blocking or self._is_complete(rank, entry.number, stream)

    def _is_complete(self, rank: int, number: int, stream: _Stream) -> bool:
        if (rank, number) not in self._of:  # begun in an earlier step
            return True
        if (rank, number) in self._begun and all(
            each in self._begun for each in self._partners.get((rank, number), ())
        ):
            return True
        stream.waits_for = self._of[rank, number]
        return False

    def _explanation(self, stuck: Sequence[tuple[int, int]]) -> str:
        lines = []
        for rank, number in stuck:
            waited = self._streams[rank, number].waits_for
            if waited is None:
                continue
            partners = self._partners.get((rank, waited.number), [])
            late = sorted(other for other, each in partners if (other, each) not in self._begun)
            whom = listed(late) if late else "an operation before it"
            lines.append(f"rank {rank} waits for {whom} in {text_of(self._traces[rank], waited)}")
        return (
            "ranks wait for each other for ever: "
            + "; ".join(lines or ["no rank can go on"])
            + (": all ranks must start operations that depend on each other in the same order")
        )


def check_order(traces: Mapping[int, Trace]) -> None:
    """Runs the communication of all recorded ranks without time.

    Raises:
        DeadlockError: they wait for each other for ever, as when two ranks use two groups in different orders.
    """
    _Order(traces).run()


# Checkpoints


def saves_of_some_ranks(traces: Mapping[int, Trace]) -> Iterator[Problem]:
    """Yields the skipped saves by all ranks of a group that some recorded ranks have not called, one for each line."""
    saves = {rank: [each for each in trace.skipped if each.startswith(_SAVES)] for rank, trace in traces.items()}
    for text in dict.fromkeys(each for of_rank in saves.values() for each in of_rank):
        callers = [rank for rank, of_rank in saves.items() if text in of_rank]
        if others := sorted(saves.keys() - callers):
            yield Problem(
                "save of some ranks",
                f"{text} is called on {listed(callers)}, but not on {listed(others)}: every rank of its group calls it",
            )


# Reductions in a narrow type


def narrow_reductions(traces: Mapping[int, Trace]) -> Iterator[Problem]:
    """Yields large reductions in 16 bits or fewer, one for each line."""
    seen = set()
    for trace in traces.values():
        # Groups of tensor parallelism reduce activations in their own type, forward and backward.
        forward = {
            entry.group
            for entry in trace.entries
            if isinstance(entry, Collective) and entry.op and entry.phase == "forward"
        }
        for entry in trace.entries:
            if not (isinstance(entry, Collective) and entry.op in ("sum", "mean") and entry.dtype in _NARROW):
                continue
            size, where = len(trace.groups[entry.group].ranks), text_of(trace, entry)
            place = entry.kind, entry.dtype, trace.line(entry, "")
            if entry.phase != "backward" or entry.group in forward or size < 2 or place in seen:
                continue
            seen.add(place)
            yield Problem(
                "narrow reduction",
                f"{where} adds gradients of {counted(size, 'rank')} in {entry.dtype}: reduce in float32, as by "
                f"{_in_float32(trace, entry)}, unless this is meant",
            )


def _in_float32(trace: Trace, entry: Collective) -> str:
    """Returns how a program reduces gradients in float32."""
    # FSDP with replicas reduces the shards of a group among them.
    if any(isinstance(each, Collective) and each.kind == "reduce_scatter" for each in trace.entries):
        # FSDP1 divides sums by itself.
        return _OF_FSDP2 if entry.op == "mean" else f"{_OF_FSDP1} of FSDP1 or {_OF_FSDP2} of FSDP2"
    return f"DDP of float32 parameters with autocast and without bf16_compress_hook, or {_OF_FSDP1} of FSDP1"
