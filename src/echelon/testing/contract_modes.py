"""The clause of the contract that concerns torch's inference mode."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from echelon.backends.base import Backend
from echelon.testing.expect import SECONDS, expect
from echelon.testing.ranks import RunRanks

_LENGTHS = (4, 300_000)
"""Of a message that is copied as a whole, and of one that may be lent or come in pieces."""


def inference_mode_stays_with_its_caller(run_ranks: RunRanks) -> None:
    """Checks that received tensors are ordinary ones, whoever is in inference mode, and that `out` may be otherwise."""

    def act(backend: Backend) -> None:
        for length in _LENGTHS:
            for is_sender_inside, is_receiver_inside in ((True, False), (False, True)):
                if backend.rank == 0:
                    with torch.inference_mode() if is_sender_inside else nullcontext():
                        works = [backend.isend(torch.full((length,), 7.0), 1, tag) for tag in range(3)]
                        for work in works:  # all at once: a send may last until its message is asked for
                            work.wait(SECONDS)
                    continue
                with torch.inference_mode():
                    places = [torch.zeros(length) for _ in range(2)]
                with torch.inference_mode() if is_receiver_inside else nullcontext():
                    got = backend.recv(0, 1, timeout=SECONDS)  # tag 0 has arrived before it, unclaimed
                    backend.recv(0, 0, out=places[0], timeout=SECONDS)
                    backend.recv(0, 2, out=places[1], timeout=SECONDS)
                expect(not got.is_inference(), "a received tensor is one of inference mode")
                for tensor in (got.mul_(1.0), *places):
                    expect(bool((tensor == 7.0).all()), f"{length} times 7 came as {tensor[:4].tolist()} and so on")

    run_ranks(2, act)
