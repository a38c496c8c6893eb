"""Sources of a program: its script, and the modules that it imports from folders of the user."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from echelon.call_site import is_foreign

_OF_RANKS = (b"init_process_group", b"RANK", b"WORLD_SIZE")
"""torch's call for a group, which may use any address or a file; variables by which ranks share work without one."""


def knows_ranks(name: str, *, is_module: bool) -> bool:
    """Whether the sources of a program name torch's call for a group, or the variables with rank and world size."""
    return any(word in source for source in _sources(name, is_module=is_module) for word in _OF_RANKS)


def _sources(name: str, *, is_module: bool) -> Iterator[bytes]:
    """Yields each source once. Modules that are named by a text alone, as for importlib, are not found."""
    first = Path.cwd() if is_module else Path(name).resolve().parent
    folders = [first, *(Path(each) for each in sys.path if not is_foreign(os.path.join(each, "")))]
    pending = _files(folders, name) + _files(folders, f"{name}.__main__") if is_module else [Path(name).resolve()]
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen or is_foreign(str(path)):
            continue
        seen.add(path)
        try:
            source = path.read_bytes()
            yield source
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):  # such as one for another version of Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                pending += [file for each in node.names for file in _files(folders, each.name)]
            elif isinstance(node, ast.ImportFrom):
                within = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else folders
                names = [f"{node.module}.{each.name}" if node.module else each.name for each in node.names]
                pending += [file for each in names for file in _files(within, each)]


def _files(folders: list[Path], name: str) -> list[Path]:
    """Returns the files of a module and of the packages around it."""
    parts = name.split(".")
    bases = [folder.joinpath(*parts[:count]) for folder in folders for count in range(1, len(parts) + 1)]
    return [file for base in bases for file in (base / "__init__.py", Path(f"{base}.py")) if file.is_file()]
