"""Metadata of the package that follow from one setting: `[tool.echelon] repository` in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def urls_of(repository: str) -> dict[str, str]:
    """Returns the project's links for the package index. None if the repository has no address yet."""
    if not repository:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }


def with_whole_links(text: str, repository: str, version: str) -> str:
    """Returns a page whose relative links lead to the repository, at the tag of the version.

    A package index shows the page alone, without the files beside it.
    """
    if not repository:
        return text

    def whole(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({repository}/{kind}/v{version}/{link[3]})"

    return _LINK.sub(whole, text)


class RepositoryHook(MetadataHookInterface):
    """Hook of hatchling that sets the links and the description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds `urls` and `readme`, which pyproject.toml declares as dynamic."""
        import tomllib

        root = Path(self.root)
        settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        repository = settings["tool"]["echelon"]["repository"].rstrip("/")
        metadata["urls"] = urls_of(repository)
        text = with_whole_links((root / "README.md").read_text(encoding="utf-8"), repository, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
