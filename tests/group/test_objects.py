"""Objects travel as text, whole or not at all."""

import pytest

import echelon


def value_of(rank):
    return {"rank": rank, "deep": [None, True, 1.5, "é" * rank, {}], "long": list(range(100 * rank))}


def exchange(group):
    mine, last = value_of(group.rank), group.world_size - 1
    for_each = [value_of(rank) for rank in range(group.world_size)] if group.rank == last else None
    works = [
        group.all_gather_object(mine, async_op=True),
        group.gather_object(mine, last, async_op=True),
        group.broadcast_object(mine if group.rank == last else {1, 2}, last, async_op=True),
        group.scatter_object(for_each, last, async_op=True),
        group.barrier(async_op=True),
    ]
    mine["rank"] = "changed"
    blocking = (
        group.all_gather_object(value_of(group.rank)),
        group.gather_object(value_of(group.rank), last),
        group.broadcast_object(value_of(group.rank), last),
        group.scatter_object(for_each, last),
        group.barrier(),
    )
    return [work.wait() for work in works], list(blocking)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_exchange_of_objects(run, world_size):
    everyone = [value_of(rank) for rank in range(world_size)]
    for rank, results in enumerate(run(exchange, world_size)):
        is_last = rank == world_size - 1
        wanted = [everyone, everyone if is_last else None, everyone[-1], everyone[rank], None]
        assert results == (wanted, wanted)


def broadcast_in_parts(group):
    return group.broadcast_object({"words": ["a", "b"] * 50} if group.rank == 1 else None, src=1)


def test_an_object_may_come_in_parts(run, monkeypatch):
    monkeypatch.setenv("ECHELON_BROADCAST", "scatter_all_gather")
    assert echelon.simulate(broadcast_in_parts, 5).results == [{"words": ["a", "b"] * 50}] * 5


LOOP = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, "Object of type set is not JSON serializable"),
        ({"a": {1: 2}}, "key 1: keys are text in JSON, make it '1'"),
        ([{None: 2}], "the key None"),
        (LOOP, "Circular reference"),
        (b"bytes", "type bytes"),
    ],
)
def test_what_would_not_come_as_it_is_is_refused(value, words):
    with pytest.raises(echelon.UnsupportedOp, match=words):
        echelon.simulate(lambda group: group.all_gather_object(value), 1)


def test_there_must_be_an_object_for_each_rank():
    for values in (None, [1, 2]):
        with pytest.raises(echelon.SizeMismatch, match="expected 1 values"):
            echelon.simulate(lambda group, values=values: group.scatter_object(values, 0), 1)
