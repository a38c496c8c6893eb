"""Test tools for distributed code, Echelon's own and yours."""

from echelon.launch.spawn import RankPool
from echelon.testing.contract import ContractError, check_backend, clause_names
from echelon.testing.decorator import simulated
from echelon.testing.races import RaceError, check_same_results
from echelon.testing.ranks import RunRanks, ranks_in_threads, simulated_ranks

__all__ = [
    "ContractError",
    "RaceError",
    "RankPool",
    "RunRanks",
    "check_backend",
    "check_same_results",
    "clause_names",
    "ranks_in_threads",
    "simulated",
    "simulated_ranks",
]
