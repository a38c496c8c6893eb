"""Checks the prose of docstrings and of Markdown pages: python tools/prose.py [FILE or FOLDER ...]

First lines of docstrings: one is a riddle if a module or class opens with What, Who, Whether, Where, When or How, or if
any first line names a thing by "what", "those" or "whatever".

Sentences of pages and of whole docstrings: at most 30 words, none that opens with What, Whatever, Those or Who unless
it is a question, and no word that was ours alone. Code, tables, headings and links' targets are left out.

Pages must have no problem. Of first lines, and of the sentences of docstrings, at most 1 % may have one.

Exits with 1 if a rule is broken. Also prints the number of comments per 100 lines of code in src; noqa and type: ignore
do not count.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_RIDDLES = 0.01
"""Share of first lines, and of the sentences of docstrings, that may break a rule."""
# The goal is 20. Lists of names need more; above 30 a reader starts again.
MOST_WORDS = 30
_OPENS_WITH_A_QUESTION = re.compile(r"(What|Who|Whether|Where|When|How)\b")
_NAMES_NOTHING = re.compile(r"\b(what|those|whatever)\b", re.IGNORECASE)
_DIRECTIVE = re.compile(r"noqa|type: ignore|fmt:|pragma|mypy:")
_IS_A_RIDDLE = re.compile(r"(What|Whatever|Those|Who)\b(?!.*\?$)")

PLAIN_WORDS = {
    r"those (that|who|which)": "repeat the noun",
    r"that one's|this one's": "repeat the noun",
    r"what of (it|them)": "the part that ...",
    r"what is|what it|what they|what was|what were|what has|what comes|what else": "name the thing",
    r"(is|are|was|were|be|been|gets?) told": "receives, sees, raises",
    r"beside (the rest of )?backward": "during backward",
    r"behind (the )?backward": "after backward",
    r"stand-ins?": "mock",
    r"farewell|goodbye": "CLOSE frame",
    r"lets? go of": "frees, drops",
    r"world of one": "world size of 1",
    r"so many": "the number",
    r"as ever": "as usual",
}
"""Words that were ours alone, as patterns, with the field's words for them."""


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


class Sentence(NamedTuple):
    """Sentence of a page, with the line at which its paragraph begins."""

    line: int
    text: str

    def problems(self) -> Iterator[str]:
        """Yields a text for each rule that it breaks."""
        num_words = len(self.text.split())
        if num_words > MOST_WORDS:
            yield f"{num_words} words, at most {MOST_WORDS}"
        if _IS_A_RIDDLE.match(self.text):
            yield "opens with a riddle: name the thing"
        for pattern, plain in PLAIN_WORDS.items():
            if found := re.search(rf"\b({pattern})\b", self.text, re.IGNORECASE):
                yield f"{found[0]!r}: {plain}"


def sentences(page: str) -> Iterator[Sentence]:
    """Yields the sentences of a page in Markdown, list items included."""
    for first, paragraph in _paragraphs(page):
        text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", paragraph)  # links: their text alone
        text = re.sub(r"`[^`]*`", "CODE", text).replace("**", "").replace("*", "")
        for sentence in re.split(r"(?<=[.!?])\)?\s+", text):
            # A colon or semicolon ends a thought as a full stop does: the longest part counts.
            for part in re.split(r"[:;]\s+", sentence):
                yield Sentence(first, part.strip())


def _paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Yields paragraphs and list items with their first line's number, without code, tables and headings."""
    first, lines, in_code = 0, list[str](), False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        is_picture = "  " in line.strip()  # docstrings draw schedules without indentation
        is_text = line.strip() and not (fence or in_code or is_picture or line.startswith(("    ", "|", "#", "![")))
        begins = re.match(r"\s*([-*]|\d+\.)\s+", line)
        if lines and (not is_text or begins):
            yield first, " ".join(lines)
            lines = []
        if is_text:
            first = first if lines else number
            lines.append(line[begins.end() :] if begins else line.strip())


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring, those of fields and constants included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, inspect.cleandoc(node.value.value)


def check_code(paths: list[Path]) -> bool:
    """Prints the riddles in Python files. True if they are few enough."""
    found: list[FirstLine] = []
    num_comments = num_code = num_sentences = num_problems = 0
    for path in paths:
        source = path.read_text()
        tree = ast.parse(source)
        found += first_lines(path, tree)
        for line, text in docstrings(tree):
            for sentence in sentences(text):
                num_sentences += 1
                for problem in sentence.problems():
                    num_problems += 1
                    print(f"{path}:{line}: {problem}: {sentence.text[:70]}")
        if "src" in path.parts:
            comments, code = comments_and_code(source, tree)
            num_comments += comments
            num_code += code
    riddles = [line for line in found if line.is_riddle]
    for line in riddles:
        print(f"{line.path}:{line.line}: {line.text}")
    share = len(riddles) / max(len(found), 1)
    print(f"{len(riddles)} of {len(found)} first lines are riddles ({share:.1%}, at most {MOST_RIDDLES:.0%}).")
    print(f"{num_problems} problems in {num_sentences:,} sentences of docstrings (at most {MOST_RIDDLES:.0%}).")
    print(f"{100 * num_comments / max(num_code, 1):.1f} comments per 100 of {num_code:,} lines of code.")
    return share <= MOST_RIDDLES and num_problems <= MOST_RIDDLES * num_sentences


def check_pages(paths: list[Path]) -> bool:
    """Prints the sentences of pages that break a rule. True if none does."""
    num_sentences = num_problems = 0
    for path in paths:
        for sentence in sentences(path.read_text(encoding="utf-8")):
            num_sentences += 1
            for problem in sentence.problems():
                num_problems += 1
                print(f"{path}:{sentence.line}: {problem}: {sentence.text[:70]}")
    print(f"{num_problems} problems in {num_sentences:,} sentences of {len(paths)} pages.")
    return not num_problems


def main(names: list[str]) -> int:
    """Checks some files and folders and returns the exit status."""
    paths: list[Path] = []
    for path in map(Path, names or ["src"]):
        if not path.exists():
            print(f"there is no {path}")
            return 1
        paths += sorted([*path.rglob("*.py"), *path.rglob("*.md")]) if path.is_dir() else [path]
    code = [path for path in paths if path.suffix == ".py"]
    pages = [path for path in paths if path.suffix == ".md"]
    kept = [check_code(code) if code else True, check_pages(pages) if pages else True]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
