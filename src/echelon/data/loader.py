"""DataLoader: torch's, with samples dealt to the ranks and a place that is saved and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler

from echelon.arguments import is_amount, is_count, is_integral, named, no_attribute, refuse_others
from echelon.data.sampler import RANKS_OF_TORCH, DistributedSampler
from echelon.errors import InvalidArgument
from echelon.group.group import ProcessGroup
from echelon.launch.init import CURRENT


class DataLoader(TorchDataLoader[Any]):
    """torch's DataLoader whose samples are dealt to the ranks, each exactly once an epoch.

    Its place counts the batches that the program got, not the ones that workers prepare ahead. Pass it as `loader=` to
    `echelon.checkpoint.Store`: a run goes on in the middle of an epoch, on any number of ranks. DistributedSampler
    describes epochs, uneven ends and weights.
    """

    @refuse_others(
        **RANKS_OF_TORCH,
        sampler=" the loader deals the samples to the ranks itself: leave it out",
        batch_sampler=" the loader deals the samples to the ranks itself: give batch_size=",
        generator=" the order follows from seed=",
    )
    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        group: ProcessGroup = CURRENT,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        """Makes the loader of one rank.

        Args:
            dataset: the samples, with a length.
            batch_size: samples of a batch of each rank.
            shuffle: whether each epoch has a random order of its own.
            group: the data-parallel ranks. Default: those of `echelon.init()`, or of the simulated ranks.
            seed: seed of the orders and of the workers, the same on all ranks.
            drop_last: leave out the last samples of an epoch if not all ranks would have a whole batch.
            num_workers, collate_fn, pin_memory, timeout, worker_init_fn, prefetch_factor, persistent_workers: as of
                torch's DataLoader.

        Raises:
            InvalidArgument: an argument has a wrong type or value, or there is no group.
        """
        if not is_count(batch_size, 1):
            raise InvalidArgument(f"batch_size is {named(batch_size)}: give each rank's samples, 1 or more")
        if not is_integral(num_workers):
            raise InvalidArgument(f"num_workers is {named(num_workers)}: give a whole number, 0 or more")
        if prefetch_factor is not None and not is_integral(prefetch_factor, 1):
            raise InvalidArgument(f"prefetch_factor is {named(prefetch_factor)}: give batches of a worker, 1 or more")
        if not is_amount(timeout):
            raise InvalidArgument(f"timeout is {named(timeout)}: give seconds, or 0 to wait for ever")
        self._samples = DistributedSampler(dataset, group, shuffle, seed, drop_last, multiple=batch_size)  # type: ignore[arg-type]
        # A generator of its own: torch's loader draws a number from it at each pass. From the global one, a run that
        # goes on would draw others than the undisturbed run.
        self._worker_seeds = torch.Generator()
        super().__init__(
            dataset,
            batch_size,
            sampler=_Ahead(self._samples),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            generator=self._worker_seeds,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yields this rank's batches from the present place to the end of the epoch. Waits for all ranks first.

        Raises:
            CollectiveMismatch: the ranks are not at the same place, or their datasets or seeds differ.
        """
        samples = self._samples
        with samples.passing():
            # A hash of numbers is the same in each process, other than one of text. By rank: workers of two ranks must
            # not augment their samples alike.
            self._worker_seeds.manual_seed(hash((samples.seed, *samples.place, samples.rank)) & (2**63 - 1))
            assert self.batch_size is not None
            for batch in super().__iter__():
                # Before the program gets it: a state that is saved in the loop counts this batch.
                samples.take(self.batch_size)
                yield batch
            samples.finish()

    @property
    def epoch(self) -> int:
        """Number of the epoch from 0: inside a loop that of the loop, else that of the next one."""
        return self._samples.epoch

    @property
    def batches_left(self) -> int:
        """Number of this rank's batches that are left in the epoch. 0 while a loop has its last one.

        In a resumed epoch a loop has fewer batches than `len(loader)`, which is the number of the whole epoch.
        """
        assert self.batch_size is not None
        return -(-len(self._samples.left()) // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch. Does nothing within that epoch, and is not needed.

        Raises:
            InvalidArgument: `epoch` is not a whole number of at least 0.
        """
        self._samples.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place and the order, equal on all ranks."""
        return self._samples.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the place of a state, which any number of ranks saved.

        Raises:
            InvalidArgument: the state is of another dataset, or of another order.
        """
        self._samples.load_state_dict(state)


_MEANT = {
    "set_epoch": " each pass is the next epoch: remove the call",
    "state_dict": " call it on the loader",
    "load_state_dict": " call it on the loader",
}


class _Ahead(Sampler[int]):
    """Samples as workers take them, ahead of the program. They are counted when their batch is delivered."""

    def __init__(self, samples: DistributedSampler) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[int]:
        return iter(self._samples.indices())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("the sampler of a DataLoader", name, (), _MEANT)
