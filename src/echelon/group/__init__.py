"""Process groups: the user's object, its calls, and how they are checked and run."""

from echelon.group.group import JsonLike, ProcessGroup, check_group

__all__ = ["JsonLike", "ProcessGroup", "check_group"]
