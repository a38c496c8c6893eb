"""Tools to test distributed code, Echelon's own and yours."""

from echelon.testing.contract import ContractError, check_backend, clause_names
from echelon.testing.pool import RankPool

__all__ = ["ContractError", "RankPool", "check_backend", "clause_names"]
