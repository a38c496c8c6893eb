"""Process groups: the user's object, its calls, their checks, and the runner of collectives."""

from echelon.group.group import JsonLike, ProcessGroup, check_group

__all__ = ["JsonLike", "ProcessGroup", "check_group"]
