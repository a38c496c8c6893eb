"""Damaged checkpoints: each is refused, and the message names the file and the tensor."""

import json
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch

import echelon
from echelon.checkpoint import Store
from echelon.checkpoint.files.folder import Folder
from echelon.checkpoint.files.manifest import BLOCK, MAX_MANIFEST, NAME
from echelon.checkpoint.ranks.loading import open_checkpoint
from echelon.checkpoint.ranks.saving import Saver
from echelon.checkpoint.state import Wanted
from echelon.errors import CheckpointError
from tests.helpers.checkpoints import load, loaded, same, state_of, tensors_of

ROWS = 195_000
"""The weight then has 8.6 MB: each of two files has a second block."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two steps, saved by two ranks."""
    path = tmp_path_factory.mktemp("damage")

    def job(group):
        saver = Saver(path, group)
        for step in (1, 2):
            saver.save(step, state_of(tensors_of(step, ROWS)))
        saver.close()

    echelon.simulate(job, 2)
    (path / ".lock").unlink()
    return path


@pytest.fixture
def two(made):
    """The second step, whose files a test may change: they are put back."""
    folder = made / "step-00000002"
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    aside = made.parent / f"{made.name}-aside"
    (made / "step-00000001").rename(aside)
    yield folder
    aside.rename(made / "step-00000001")
    shutil.rmtree(folder)
    folder.mkdir()
    for name, data in whole.items():
        (folder / name).write_bytes(data)


def refused(folder, names):
    """Loads and verifies a damaged step. Checks that both name one of the files, and returns the message of loading."""
    with pytest.raises(CheckpointError) as caught:
        loaded(open_checkpoint(folder.parent, step=2))
    problems = Folder(folder.parent).verify(2)
    for message in (str(caught.value), " ".join(problems)):
        assert any(name in message for name in names), message
        assert "\n" not in message.replace(r"\n", "").replace('odd "name"\n', "")
    return str(caught.value)


def tensor_at(folder, name, position):
    """Returns the tensors whose bytes are in the block of a position."""
    first, last = position // BLOCK * BLOCK, position // BLOCK * BLOCK + BLOCK
    manifest = Folder(folder.parent).manifest(2)
    layout = manifest.tensors.layouts[int(name[5:10])]
    return [place.part.name for place in layout.placed if place.begin < last and place.end > first]


def damage(folder, rng):
    """Damages a step in one of many ways. Returns the names that a message may give to it, and the block's tensors."""
    files = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
    name = rng.choice([*files, NAME])
    path, (one, other) = folder / name, files
    data = path.read_bytes()
    kind = rng.choice(["flip", "flip", "flip", "cut", "longer", "missing", "doubled", "swapped", "foreign", "stray"])
    tensors = []
    if kind == "flip":
        position = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 4096))
        tensors = tensor_at(folder, name, position) if name != NAME else []
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([data[position] ^ 1 << rng.randrange(8)]))
    elif kind == "cut":
        with path.open("r+b") as file:
            file.truncate(rng.randrange(len(data)))
    elif kind == "longer":
        path.write_bytes(data + rng.randbytes(rng.randrange(1, 100)))
    elif kind == "missing":
        path.unlink()
    elif kind == "doubled":
        target = rng.choice([other, "rank-00002.safetensors"])
        shutil.copyfile(folder / one, folder / target)
        return [target], []
    elif kind == "swapped":
        first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
        (folder / one).write_bytes(second)
        (folder / other).write_bytes(first)
        return files, []
    elif kind == "foreign":
        shutil.copyfile(folder.parent.parent / f"{folder.parent.name}-aside" / name, path)
    else:
        name = rng.choice(["model.safetensors", "rank-00009.safetensors"])
        shutil.copyfile(folder / one, folder / name)
    return [name], tensors


@pytest.mark.parametrize("num_cases", [50, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_every_damage_is_refused(two, num_cases):
    whole = {path.name: path.read_bytes() for path in two.iterdir()}
    names = set(tensors_of(2, 1))
    for number in range(num_cases):
        files, tensors = damage(two, random.Random(number))
        message = refused(two, files)
        if tensors:
            assert tensors[0] in message
        elif NAME not in message and "not of this checkpoint" not in message:
            assert any(name in message for name in names), message
        for name in files:
            if name in whole:
                (two / name).write_bytes(whole[name])
            else:
                (two / name).unlink()
    assert same(load(two.parent)[1], tensors_of(2, ROWS))


def rewritten(folder, change):
    """Changes the content of a manifest, and gives it the right checksum."""
    path = folder / NAME
    content = json.loads(path.read_text())["content"]
    body = change(content)
    data = body if isinstance(body, bytes) else json.dumps(content).encode()
    path.write_bytes(b'{"echelon checkpoint": 1, "crc32": "%08x", "content": ' % zlib.crc32(data) + data + b"}\n")


def weight(content):
    return content["tensors"]["weight"]


HALF = ROWS * 11 // 2
CRAFTED = {
    "a piece is missing": (lambda c: weight(c)["pieces"].pop(0), "weight: elements 0 to .* are missing"),
    "the last piece is missing": (lambda c: weight(c)["pieces"].pop(), "weight has .* some are missing"),
    "a piece is doubled": (lambda c: weight(c)["pieces"].insert(0, weight(c)["pieces"][0]), "weight: .* are doubled"),
    "pieces overlap": (lambda c: weight(c)["pieces"][1].__setitem__(1, 5), "weight: elements 5 to .* are doubled"),
    "an unknown file": (lambda c: weight(c)["pieces"][0].__setitem__(0, 2), "2 in place of a number from 0 to 1"),
    "an empty piece": (lambda c: c["tensors"]["empty"]["pieces"].append([0, 0, 0]), "empty: elements 0 to 0"),
    "another shape": (lambda c: weight(c).update(shape=[5]), "weight has 5 elements"),
    "an absurd shape": (lambda c: weight(c).update(shape=[1 << 59, 1 << 59]), "weight has the shape"),
    "a negative size": (lambda c: weight(c).update(shape=[-1]), "-1 in place of a number"),
    "another dtype": (lambda c: weight(c).update(dtype="float64"), r"rank-00000.safetensors has \d+ bytes"),
    "an unknown dtype": (lambda c: weight(c).update(dtype="posit8"), "weight has the dtype 'posit8'"),
    "a wrong number of checksums": (lambda c: c["files"][0]["crc32"].pop(), "rank-00000.safetensors has .* checksums"),
    "no file": (lambda c: c.update(files=[]), "0 files"),
    "no tensors": (lambda c: c.pop("tensors"), "KeyError: 'tensors'"),
    "a list of tensors": (lambda c: c.update(tensors=[]), "describes no checkpoint"),
    "a name twice": (lambda c: json.dumps(c)[:-1].encode() + b', "step": 3}', "the name 'step' is there twice"),
    "deep nesting": (lambda _: b"[" * 100_000, "describes no checkpoint: RecursionError"),
    "a long number": (lambda _: b'{"step": ' + b"9" * 5000 + b"}", "describes no checkpoint: ValueError"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_manifest_that_describes_no_checkpoint(two, case):
    change, expected = CRAFTED[case]
    rewritten(two, change)
    with pytest.raises(CheckpointError, match=expected):
        load(two.parent, 2)


def section(name, value):
    return lambda content: content["data"].update({name: value}), f"^the manifest of step 1 has '{name}' in a form that"


def shared(value):
    return lambda content: content["data"]["shared"].update({"extra/a": value}), "^extra/a of step 1 has a form that no"


STRANGE = {
    "no sections": (lambda content: content.update(data={}), "^the manifest of step 1 has 'aliases' in a form that no"),
    "places of another number of ranks": section("places", [[0, 1, 0, 1]] * 2),
    "a negative place": section("places", [[-1, 1, 0, 1]]),
    "models without lists": section("models", {"": 3}),
    "names that are no text": section("models", {"": [["weight"]]}),
    "groups without parameters": section("groups", {"optimizer": [{"options": {}}]}),
    "a number of steps that is none": section("progress", {"": {"num_steps": "7"}}),
    "a mean number of samples that is none": section("progress", {"": {"usual_samples": -1.0}}),
    "an array of objects": shared({"!array": ["extra/t", "O", [1]]}),
    "an array of an absurd shape": shared({"!array": ["extra/t", "uint8", [1 << 60]]}),
    "a number that is text": shared({"!int": "seven"}),
    "an unknown kind": shared({"!pickle": []}),
    "a list as a key": shared({"!dict": [[{"!set": []}, 1]]}),
    "a tensor that is not there": (
        lambda content: content["data"]["shared"].update({"extra/a": {"!tensor": "/etc/passwd"}}),
        "^step 1 has no tensor /etc/passwd, to which its manifest refers$",
    ),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_manifest_with_values_that_no_save_writes(tmp_path, case):
    change, expected = STRANGE[case]
    model = torch.nn.Linear(2, 2)
    store = Store(tmp_path)
    store.save(1, model=model, extra={"a": 1, "t": torch.ones(3)})
    rewritten(tmp_path / "step-00000001", change)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=expected) as caught:
        store.load(model=model, extra={})
    assert "\n" not in str(caught.value)
    assert torch.equal(model.weight, before)


def test_a_manifest_of_a_newer_version_is_refused_though_an_older_step_is_there(made):
    path = made / "step-00000002" / NAME
    data = path.read_bytes()
    try:
        path.write_bytes(data.replace(b'checkpoint": 1', b'checkpoint": 2', 1))
        with pytest.raises(CheckpointError, match="has format 2, and this one reads up to 1; update Echelon"):
            load(made)
    finally:
        path.write_bytes(data)


def test_a_damaged_manifest_is_passed_over_with_a_warning(made):
    path = made / "step-00000002" / NAME
    data = path.read_bytes()
    try:
        path.write_bytes(data[:-9])
        with pytest.warns(UserWarning, match="step 1 is the newest that can be read: .*step-00000002/manifest.json"):
            assert load(made)[0] == 1
        assert Folder(made).steps() == [1]
        assert Folder(made).verify(2) == [f"{path}: it is damaged: its CRC32 differs"]
    finally:
        path.write_bytes(data)


def test_a_step_that_is_a_link_is_not_passed_over_in_silence(made, tmp_path):
    """A run whose newest step had been moved to another disk went on from an older one."""
    path = shutil.copytree(made, tmp_path / "run")
    for step in (2, 1):
        (path / f"step-0000000{step}").rename(tmp_path / str(step))
        (path / f"step-0000000{step}").symlink_to(tmp_path / str(step))
        if step == 2:
            with pytest.warns(UserWarning, match="step 1 is the newest that can be read: .*-00000002 is a link or a f"):
                assert load(path)[0] == 1
    with pytest.raises(CheckpointError, match="step-00000002 is a link or a file, and no checkpoint: move the folder"):
        load(path)


def test_a_manifest_of_absurd_size_is_not_read(two):
    with (two / NAME).open("r+b") as file:
        file.truncate(MAX_MANIFEST + 1)  # a hole: it takes no space
    with pytest.raises(CheckpointError, match=f"has {MAX_MANIFEST + 1} bytes: it is damaged"):
        load(two.parent, 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a file is missing": lambda folder: (folder / "rank-00001.safetensors").unlink(),
    "a file is cut": lambda folder: (folder / "rank-00000.safetensors").write_bytes(b"!"),
    "a stray file": lambda folder: (folder / "model.safetensors").write_bytes(b"!"),
    "a bit is flipped": lambda folder: flip(folder / "rank-00000.safetensors"),
    "the manifest is cut": lambda folder: (folder / NAME).write_bytes(b"!"),
}


def save_steps(group, path):
    saver = Saver(path, group)
    for step in (1, 5, 7, 9):
        saver.save(step, state_of({"a": torch.ones(300)}))
    saver.close()


@pytest.mark.parametrize("case", DAMAGES)
def test_the_error_of_a_damaged_step_names_the_complete_one_before(tmp_path, case):
    echelon.simulate(save_steps, 2, (str(tmp_path),))
    (tmp_path / "step-00000007" / "rank-00000.safetensors").unlink()
    DAMAGES[case](tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match=r"; to go on from the complete one before it, load step=5$"):
        load(tmp_path, 9)
    shutil.rmtree(tmp_path / "step-00000001")
    shutil.rmtree(tmp_path / "step-00000005")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, 9)
    assert "to go on" not in str(caught.value)


def test_only_blocks_with_wanted_elements_are_read(two):
    name = "rank-00000.safetensors"
    manifest = Folder(two.parent).manifest(2)
    last = next(place for place in manifest.tensors.layouts[0].placed if place.part.name == "weight")
    with (two / name).open("r+b") as file:
        file.seek(last.end - 1)
        byte = file.read(1)[0]
        file.seek(last.end - 1)
        file.write(bytes([byte ^ 1]))
    checkpoint = open_checkpoint(two.parent)
    out = torch.empty(11)
    checkpoint.read([Wanted("weight", 11, out)])
    assert torch.equal(out, tensors_of(2, ROWS)["weight"][1])
    with pytest.raises(CheckpointError, match=f"{name} is damaged: bytes {BLOCK} to .* they hold weight"):
        checkpoint.read([Wanted("weight", last.part.stop - 11, out)])


def test_the_header_of_a_file_is_checked_with_any_of_its_tensors(two):
    name = "rank-00000.safetensors"
    layout = Folder(two.parent).manifest(2).tensors.layouts[0]
    last = next(place for place in layout.placed if place.part.name == "weight")
    assert last.end > BLOCK
    with (two / name).open("r+b") as file:
        file.seek(20)
        file.write(b"!")
    with pytest.raises(CheckpointError, match=f"{name} is damaged: bytes 0 to {BLOCK}"):
        open_checkpoint(two.parent).read([Wanted("weight", last.part.stop - 11, torch.empty(11))])


def test_a_file_that_is_a_pipe_does_not_block(two):
    import os

    path = Path(two / "rank-00000.safetensors")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors is missing; it holds"):
        load(two.parent)
