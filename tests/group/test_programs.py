"""Random programs give what one process gives, or the same error on all ranks."""

import pytest
from hypothesis import HealthCheck, given, settings

import echelon
from tests.helpers.random_programs import programs, run, verify

FEW = settings(max_examples=75, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FEW_ON_PROCESSES = settings(FEW, max_examples=8)
MANY = settings(FEW, max_examples=10_000)
MANY_ON_PROCESSES = settings(FEW, max_examples=250)


def simulated(program):
    verify(
        program,
        echelon.simulate(run, program.world_size, (program,), timeout=20.0, late_sends=True, order="tcp").results,
    )


def on_processes(pool, program, backend):
    verify(program, pool.run(run, program.world_size, program, backend=backend))


def test_simulated_ranks():
    FEW(given(programs())(simulated))()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_processes(pool, backend):
    FEW_ON_PROCESSES(given(programs())(lambda program: on_processes(pool, program, backend)))()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_thousand_on_simulated_ranks():
    MANY(given(programs())(simulated))()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_hundreds_on_processes(pool, backend):
    MANY_ON_PROCESSES(given(programs())(lambda program: on_processes(pool, program, backend)))()
