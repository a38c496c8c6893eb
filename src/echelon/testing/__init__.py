"""Tools to test distributed code, Echelon's own and yours."""

from echelon.testing.contract import ContractError, check_backend, clause_names

__all__ = ["ContractError", "check_backend", "clause_names"]
