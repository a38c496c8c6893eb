"""docs/security.md: every test that it points to is there."""

import ast
import re
from pathlib import Path

import pytest

from echelon.arguments import MAX_LOCAL_WORLD_SIZE, MAX_WORLD_SIZE
from echelon.backends import delivery
from echelon.backends.connect import acceptor, handshake
from echelon.backends.formats import wire
from echelon.backends.tcp import control_frames, inbox, reader

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "security.md").read_text()
POINTERS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", DOCS)


def test_there_are_pointers():
    assert len(POINTERS) > 15


@pytest.mark.parametrize(("path", "name"), POINTERS)
def test_the_test_is_there(path, name):
    tree = ast.parse((ROOT / path).read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


GIB = 1 << 30
LIMITS = {
    "dimensions of a tensor": f"{wire.MAX_DIMS}",
    "note of a message": f"{wire.MAX_NOTE_BYTES:,} bytes",
    "payload of a message": f"{wire.MAX_MESSAGE_BYTES // GIB} GiB (`max_message_bytes`)",
    "unclaimed messages of a peer": f"{inbox.MAX_UNCLAIMED_BYTES // GIB} GiB (`max_unclaimed_bytes`), "
    "beyond one message of any size",
    "size of each of them, beyond its payload": f"{delivery._OVERHEAD_BYTES:,} bytes, "
    f"{delivery._DIM_BYTES} for each dimension, and its note",
    "groups that a peer revokes": f"{control_frames.MAX_REVOKED_CONTEXTS:,}",
    "control frames that a peer has not read when it sends another query": f"{control_frames.MAX_UNSENT_WORDS:,}",
    "messages in shared memory after a peer's CLOSE frame": f"{reader._MOST_AT_END:,}",
    "reading the connection of a process that has ended": f"{reader.MAX_LAST_WORDS_SECONDS:g} s",
    "hello of a rank": f"{handshake.MAX_HELLO_BYTES:,} bytes",
    "table of members": f"{handshake.MAX_HELLO_BYTES:,} bytes, and {handshake.MAX_ENTRY_BYTES:,} for each rank",
    "authenticated connections that have not sent their hello": f"{acceptor._MAX_STRANGERS} beyond the number of ranks",
    "ranks of a world": f"{MAX_WORLD_SIZE:,}",
    "ranks of a host": f"{MAX_LOCAL_WORLD_SIZE:,}",
}
"""The rows of the table of limits, with the numbers of the code."""


def test_the_table_of_limits_has_the_numbers_of_the_code():
    section = DOCS.partition("## Limits on a rank")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert {row[0]: row[1] for row in rows[1:]} == LIMITS
