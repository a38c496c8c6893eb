"""Checks the prose of docstrings: python tools/prose.py [FOLDER ...]

A first line is a riddle if a module or class opens with What, Who, Whether, Where, When or How, or if any first line
names a thing by "what", "those" or "whatever". At most 1 % of first lines may be riddles; it exits with 1 if more are.
It also prints how many comments there are per 100 lines of code; noqa and type: ignore do not count.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_RIDDLES = 0.01
_OPENS_WITH_A_QUESTION = re.compile(r"(What|Who|Whether|Where|When|How)\b")
_NAMES_NOTHING = re.compile(r"\b(what|those|whatever)\b", re.IGNORECASE)
_DIRECTIVE = re.compile(r"noqa|type: ignore|fmt:|pragma|mypy:")


class FirstLine(NamedTuple):
    """First line of a docstring."""

    path: Path
    line: int
    text: str
    names_a_thing: bool
    """Of a module or a class, not of a function."""

    @property
    def is_riddle(self) -> bool:
        """Whether a reader has to guess what it speaks of."""
        opens = self.names_a_thing and _OPENS_WITH_A_QUESTION.match(self.text)
        return bool(opens or _NAMES_NOTHING.search(self.text))


def first_lines(path: Path, tree: ast.Module) -> Iterator[FirstLine]:
    """Yields the first line of each docstring in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                names_a_thing = isinstance(node, ast.Module | ast.ClassDef)
                yield FirstLine(path, getattr(node, "lineno", 1), text.splitlines()[0], names_a_thing)


def comments_and_code(source: str, tree: ast.Module) -> tuple[int, int]:
    """Returns the number of comments, and that of lines of code: neither blank, nor comment, nor docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = sum(token.type == tokenize.COMMENT and not _DIRECTIVE.search(token.string) for token in tokens)
    strings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    code = sum(
        bool(line.strip()) and number not in strings and not line.lstrip().startswith("#") for number, line in lines
    )
    return comments, code


def main(folders: list[str]) -> int:
    """Prints the riddles in some folders and returns the exit status."""
    found: list[FirstLine] = []
    num_comments = num_code = 0
    for folder in map(Path, folders or ["src"]):
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            source = path.read_text()
            tree = ast.parse(source)
            found += first_lines(path, tree)
            comments, code = comments_and_code(source, tree)
            num_comments += comments
            num_code += code
    riddles = [line for line in found if line.is_riddle]
    for line in riddles:
        print(f"{line.path}:{line.line}: {line.text}")
    share = len(riddles) / max(len(found), 1)
    print(f"{len(riddles)} of {len(found)} first lines are riddles ({share:.1%}, at most {MOST_RIDDLES:.0%}).")
    print(f"{100 * num_comments / max(num_code, 1):.1f} comments per 100 of {num_code:,} lines of code.")
    return int(share > MOST_RIDDLES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
