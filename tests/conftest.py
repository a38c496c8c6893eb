"""What all tests share.

It imports torch late: the process that shares the tests out to others needs none, and starts them sooner without.
"""

import gc
import os
import signal
import sys
import tempfile

import pytest

import echelon
from tests.helpers.grids import share_out_backends
from tests.helpers.rank_servers import DistantServer, Server

os.environ["ECHELON_TUNED"] = "off"  # what `echelon tune` may have written here does not matter to tests
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with it ignored. Processes of tests that send it would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Takes torch, the tests and what pytest knows of them from the garbage collector, which would visit them often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        # Of a recording of `foresee`. The next collection would visit all objects: 0.3 to 1.5 s.
        gc.unfreeze = lambda: None
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is slow
def pytest_collection_modifyitems(items):
    share_out_backends(items)


_SERVERS = pytest.StashKey()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Starts the servers of ranks once for all processes among which pytest-xdist shares out the tests."""
    if _SERVERS not in node.config.stash:
        node.config.stash[_SERVERS] = [Server(), Server()]
    node.workerinput["rank_servers"] = [server.address() for server in node.config.stash[_SERVERS]]


def pytest_unconfigure(config):
    for server in config.stash.get(_SERVERS, []):
        server.end()


@pytest.fixture(scope="session")
def rank_servers(request):
    """Servers that have imported torch and become ranks: those of the whole run, or of this process alone."""
    shared = getattr(request.config, "workerinput", {}).get("rank_servers")
    if shared is not None:
        return list(map(DistantServer, shared))
    return request.config.stash.setdefault(_SERVERS, [Server(), Server()])


@pytest.fixture(scope="session")
def new_pool(rank_servers):
    """Makes pools of real processes, which the test closes."""
    from tests.helpers.preloaded_pool import PreloadedPool

    return lambda: PreloadedPool(rank_servers)


@pytest.fixture(scope="session")
def pool(new_pool):
    """Real processes as ranks, kept over the whole session."""
    with new_pool() as ranks:
        yield ranks


@pytest.fixture
def collected():
    """Collects the garbage of a test at its end, under its own filters of warnings."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def explored(tmp_path_factory):
    """The native library, compiled with a call of the test at each access to shared memory."""
    from tests.helpers.native_explorer import compile_explored

    return compile_explored(tmp_path_factory.mktemp("explored"))


def runner(request, backend):
    """Returns `run(fn, world_size, *args)`, which gives the results of all ranks on simulated ranks or on processes."""
    if backend == "whole":
        return lambda fn, world_size, *args: echelon.simulate(fn, world_size, args, timeout=20.0).results
    if backend == "simulated":
        return lambda fn, world_size, *args: (
            echelon.simulate(fn, world_size, args, timeout=20.0, late_sends=True, order="tcp").results
        )
    pool = request.getfixturevalue("pool")
    return lambda fn, world_size, *args: pool.run(fn, world_size, *args, backend=backend)


@pytest.fixture(params=["simulated", "whole", "processes", pytest.param("gloo", marks=pytest.mark.slow)])
def run(request):
    """Runs a function on simulated ranks, message by message and whole, and on processes that choose their backend."""
    return runner(request, "auto" if request.param == "processes" else request.param)


@pytest.fixture(params=["simulated", "tcp", "shm", pytest.param("gloo", marks=pytest.mark.slow)])
def on_backend(request):
    """Runs a function on simulated ranks, and on processes with each backend."""
    return runner(request, request.param)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory):
    """A launcher that is killed leaves its folder behind, as torchrun always does: where pytest tidies up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def same_process_afterwards():
    """Fails a test that leaves another main module or working folder: processes started later would take them over."""
    before = sys.modules["__main__"], os.getcwd()
    yield
    assert (sys.modules["__main__"], os.getcwd()) == before
