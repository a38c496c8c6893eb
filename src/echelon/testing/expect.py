"""What the clauses of a contract are checked with."""

from __future__ import annotations

from collections.abc import Callable

SECONDS = 20.0
"""How long anything may take."""


class ContractError(AssertionError):
    """A backend that breaks the contract; the message says which clause, and how."""


def expect(condition: bool, message: str) -> None:
    """Raises ContractError unless the condition holds."""
    if not condition:
        raise ContractError(message)


def expect_error(kind: type[BaseException], act: Callable[[], object], when: str) -> BaseException:
    """Returns the error of that kind that `act` raises; if it does not, raises ContractError."""
    try:
        act()
    except kind as error:
        return error
    except Exception as error:
        raise ContractError(f"{when}: {kind.__name__} expected, got {type(error).__name__}: {error}") from error
    raise ContractError(f"{when}: {kind.__name__} expected, nothing was raised")
