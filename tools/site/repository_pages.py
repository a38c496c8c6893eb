"""Pages of the repository outside docs/, and the links between them and the pages of docs/."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

NAMES = {"README.md": "index.md", "CONTRIBUTING.md": "project/contributing.md", "CHANGELOG.md": "project/changelog.md"}
"""Pages of the repository whose name on the site is another one."""
FOLDERS = ("benchmarks", "conformance")
"""Folders of the repository whose Markdown pages are on the site."""
PICTURES = (".png", ".svg", ".gif", ".jpg", ".webp")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".c": "c"}
_CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
# [text](target) and ![text](target "title"); [name]: target; then src="target" and its like in HTML.
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^()\s]+)(?P<after>(?:\s+\"[^\"]*\")?\))")
_DEFINITION = re.compile(r"^(?P<before>\[[^\]]+\]:\s+)(?P<target>\S+)(?P<after>)", re.MULTILINE)
_ATTRIBUTE = re.compile(r"(?P<before>\b(?:src|srcset|href)=\")(?P<target>[^\"]+)(?P<after>\")")


@dataclass(frozen=True)
class Repository:
    """Working tree of the repository, as a source of pages."""

    root: Path
    url: str = ""
    """Address of the repository on the web, without a slash at its end. Empty if it has none."""

    @cached_property
    def _pages(self) -> dict[str, str]:
        """Names on the site, by the paths in the repository of the pages outside docs/."""
        paths = [path for folder in FOLDERS for path in sorted((self.root / folder).rglob("*.md"))]
        return NAMES | {path: path for path in (path.relative_to(self.root).as_posix() for path in paths)}

    @cached_property
    def _linked(self) -> list[str]:
        """Paths in the repository that a page links to and that are no pages: pictures, sources, folders."""
        docs = [path.relative_to(self.root).as_posix() for path in sorted((self.root / "docs").rglob("*.md"))]
        found = []
        for page in [*self._pages, *docs]:
            text = (self.root / page).read_text(encoding="utf-8")
            for target in _targets(text):
                path = self._path(page, target.partition("#")[0])
                if path and not path.startswith("docs/") and path not in self._pages and path not in found:
                    found.append(path)
        return found

    def _path(self, page: str, target: str) -> str | None:
        """Returns the path in the repository that a page's link means. None for another place."""
        if self.url and target.startswith(f"{self.url}/"):
            # https://host/owner/name/blob/main/docs/plan.md; raw pictures have "raw" there.
            target = re.sub(r"^(blob|raw|tree)/[^/]+/", "", target.removeprefix(f"{self.url}/"))
            page = ""
        if not target or re.match(r"[a-z]+:|/", target):
            return None
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        return path if not path.startswith("..") and (self.root / path).exists() else None

    def name_on_site(self, path: str) -> str:
        """Returns the name that a file of the repository has among the files of the site."""
        if path.startswith("docs/"):
            return path.removeprefix("docs/")
        if path in self._pages:
            return self._pages[path]
        return path if path.endswith(PICTURES) else f"source/{path}.md"

    def pages(self) -> dict[str, str]:
        """Returns the text of each page outside docs/ by its name, linked sources and folders included."""
        pages = {name: (self.root / path).read_text(encoding="utf-8") for path, name in self._pages.items()}
        pages["index.md"] = f"---\nhide:\n  - navigation\n---\n\n{pages['index.md']}"  # it would list this page alone
        shown = [path for path in self._linked if not path.endswith(PICTURES)]
        return pages | {self.name_on_site(path): _shown(self.root, path) for path in shown}

    def pictures(self) -> dict[str, Path]:
        """Returns the pictures that these pages show, by their name."""
        return {path: self.root / path for path in self._linked if path.endswith(PICTURES)}

    def _source(self, name: str) -> str:
        """Returns the path in the repository of a page of the site."""
        paths = {on_site: path for path, on_site in self._pages.items()}
        return paths.get(name, f"docs/{name}")

    def with_links_of_site(self, text: str, name: str, address: Callable[[str], str | None]) -> str:
        """Returns a page's text with each link to a file of the repository as one to a file of the site.

        Args:
            text: Markdown.
            name: of the page, among the files of the site.
            address: the relative address of a file of the site for a browser, or None if there is no such file.
        """
        page = self._source(name)

        def replaced(match: re.Match[str], as_address: bool) -> str:
            target, hash_sign, anchor = match["target"].partition("#")
            path = self._path(page, target)
            if path is None:
                return match[0]
            on_site = self.name_on_site(path)
            link = address(on_site) if as_address else posixpath.relpath(on_site, posixpath.dirname(name) or ".")
            return match[0] if link is None else f"{match['before']}{link}{hash_sign}{anchor}{match['after']}"

        def in_prose(prose: str) -> str:
            for link in (_LINK, _DEFINITION):
                prose = link.sub(lambda match: replaced(match, False), prose)
            # mkdocs leaves HTML as it is, so its links are those of the finished site.
            return _ATTRIBUTE.sub(lambda match: replaced(match, True), prose)

        return "".join(part if is_code else in_prose(part) for is_code, part in _parts(text))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yields the parts of a page in order, each with whether it is code."""
    end = 0
    for match in _CODE.finditer(text):
        yield False, text[end : match.start()]
        yield True, match[0]
        end = match.end()
    yield False, text[end:]


def _targets(text: str) -> Iterator[str]:
    for is_code, part in _parts(text):
        if not is_code:
            yield from (match["target"] for link in (_LINK, _DEFINITION, _ATTRIBUTE) for match in link.finditer(part))


def _shown(root: Path, path: str) -> str:
    """Returns a page that shows a file, or lists the files of a folder with their first lines."""
    source = root / path
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {source.name}\n\n`{path}` in the repository.\n\n"
    if source.is_file():
        language = _LANGUAGES.get(source.suffix, "text")
        return f"{head}````{language}\n{source.read_text(encoding='utf-8').rstrip()}\n````\n"
    files = [file for file in sorted(source.iterdir()) if file.suffix in _LANGUAGES]
    blocks = (
        f"## {file.name}\n\n````{_LANGUAGES[file.suffix]}\n{file.read_text(encoding='utf-8').rstrip()}\n````\n"
        for file in files
    )
    return head + "\n".join(blocks)
