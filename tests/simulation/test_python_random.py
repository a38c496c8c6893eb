"""Python's random numbers can be taken and put back, as they lie in memory or as `random` hands them out."""

import random

import pytest

from echelon.simulation import random_state


def draws(generator):
    return [generator.random(), generator.gauss(0, 1), generator.gauss(0, 1), generator.getrandbits(70)]


@pytest.fixture(params=["as it lies", "as handed out"])
def way(request, monkeypatch):
    if request.param == "as handed out":
        monkeypatch.setattr(random_state, "_lies_open", lambda: False)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("before", [0, 1, 311, 623, 624])
def test_what_is_put_back_draws_the_same_again(before):
    generator = random.Random(7)
    for _ in range(before):
        generator.getrandbits(32)
    state = random_state.take(generator)
    first = draws(generator)
    for _ in range(1000):
        generator.random()
    random_state.put(generator, state)
    assert draws(generator) == first


@pytest.mark.usefixtures("way")
def test_half_of_a_pair_that_gauss_has_drawn_is_kept():
    generator, other = random.Random(7), random.Random(7)
    generator.gauss(0, 1)
    state = random_state.take(generator)
    random_state.put(other, state)
    assert other.gauss(0, 1) == generator.gauss(0, 1)
    random_state.put(generator, random_state.take(random.Random(8)))
    assert draws(generator) == draws(random.Random(8))


def test_states_lie_open_here():
    assert random_state._lies_open()
    assert isinstance(random_state.take(random.Random(0)).words, bytes)


def test_the_shared_generator_is_that_of_the_functions():
    state = random_state.take(random_state.shared())
    try:
        random.seed(5)
        assert random.random() == random.Random(5).random()
        random_state.put(random_state.shared(), random_state.take(random.Random(6)))
        assert random.random() == random.Random(6).random()
    finally:
        random_state.put(random_state.shared(), state)
