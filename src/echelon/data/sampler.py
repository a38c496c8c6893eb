"""DistributedSampler: samples of a dataset, dealt to the ranks of a group.

An epoch is one order of all samples, the same on all ranks. Its place in that order is the number of samples that all
ranks together have taken. Rank r takes every world_size-th sample from there on, so with n samples left no rank gets
more than one sample more than another. Place and order do not depend on the number of ranks, so any number goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from echelon._torch_private.data import is_prefetched
from echelon.arguments import is_count, named, no_attribute, refuse_others
from echelon.errors import CollectiveMismatch, InvalidArgument
from echelon.group.group import ProcessGroup
from echelon.hashing import stable_number
from echelon.launch.init import CURRENT, given_or_current
from echelon.purposes import PASS

RANKS_OF_TORCH = dict.fromkeys(("num_replicas", "rank"), " the group knows it: leave it out, or give group=")
"""Arguments of torch's sampler, with advice."""

_LOADED = object()
"""Pass of a state: it was saved inside a loop, or before one."""


class Place(NamedTuple):
    """Place in the training data: the next sample to be taken."""

    epoch: int
    position: int
    """Samples of the epoch that all ranks together have taken."""


class DistributedSampler(Sampler[int]):
    """Sampler that deals each sample of a dataset to exactly one rank, once an epoch.

    Each pass is the next epoch, in an order of its own: `set_epoch` is not needed. A loop that ends early is continued
    by the next pass. A state that is saved inside a loop, after its last sample, still belongs to this epoch: the
    resumed loop has no samples, and what follows it runs, such as the step of a scheduler. No sample is repeated to
    make ranks equal: without `drop_last` some ranks have one sample more. `DistributedDataParallel(average="samples")`
    weighs ranks by their samples. `join()` serves loops in which some ranks have a batch more, which happens if the
    last one has fewer samples than there are ranks.

    Give torch's DataLoader `generator=torch.Generator()`. Without one it draws a number from the global generator at
    each pass. A run that is resumed within an epoch would then draw one number more, and dropout would differ from
    that of the undisturbed run.

    Its state is the same on all ranks. Pass it as `loader=` to `echelon.checkpoint.Store`: another number of ranks goes
    on at the same sample.
    """

    @refuse_others(**RANKS_OF_TORCH)
    def __init__(
        self,
        dataset: Sized,
        group: ProcessGroup = CURRENT,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        multiple: int = 1,
    ) -> None:
        """Takes the length of the dataset, which is the same on all ranks.

        Args:
            dataset: the samples, with a length.
            group: the data-parallel ranks. Default: those of `echelon.init()`, or of the simulated ranks.
            shuffle: whether each epoch has a random order of its own, which depends on `seed` and epoch alone.
            seed: seed of the orders, the same on all ranks.
            drop_last: leave out the last samples of an epoch if not all ranks would have as many.
            multiple: with `drop_last`, each rank gets a multiple of this number of samples.

        Raises:
            InvalidArgument: an argument has a wrong type or value, or there is no group.
        """
        self._num_samples = _length_of(dataset)
        self._group = given_or_current(group)
        for name, value, least in (("seed", seed, 0), ("multiple", multiple, 1)):
            if not is_count(value, least):
                raise InvalidArgument(f"{name} is {named(value)}: give a whole number of at least {least}")
        # Another object, such as the group by its place, would be taken for True.
        if shuffle not in (True, False, None):
            raise InvalidArgument(f"shuffle is {named(shuffle)}: give True or False, and the group as group=")
        self._shuffle, self._seed = bool(shuffle), seed
        self._unit = multiple * self._group.world_size if drop_last else 1
        self._place = Place(0, 0)
        self._is_ahead = False
        self._pass: object | None = None  # None: outside of a loop, and of a state that was saved in one

    def __repr__(self) -> str:
        epoch, position = self.place
        rank = f"rank {self._group.rank} of {self._group.world_size}"
        return f"<DistributedSampler, {rank}: {position} of {self._num_samples} samples of epoch {epoch} are taken>"

    def __len__(self) -> int:
        """Returns the number of this rank's samples in a whole epoch."""
        return len(range(self._group.rank, self._end(0), self._group.world_size))

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's samples from the present place to the end of the epoch. Waits for all ranks first.

        Raises:
            CollectiveMismatch: the ranks are not at the same place, or their datasets or seeds differ.
            InvalidArgument: the last pass ended early, and workers of a torch DataLoader had taken samples ahead.
        """
        if self._place.position:
            self._check_exact()
        with self.passing():
            self._is_ahead = is_prefetched()
            for index in self.indices():
                self.take(1)
                yield index
            self.finish()

    @property
    def place(self) -> Place:
        """Epoch, and number of its samples that all ranks have taken. After a loop: the beginning of the next epoch."""
        return self._after() if self._pass is None else self._place

    @property
    def epoch(self) -> int:
        """Number of the epoch from 0: inside a loop that of the loop, else that of the next one."""
        return self.place.epoch

    @refuse_others()
    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch. Does nothing within that epoch, and is not needed.

        Raises:
            InvalidArgument: `epoch` is not a whole number of at least 0.
        """
        if not is_count(epoch):
            raise InvalidArgument(f"epoch is {named(epoch)}: give a whole number of at least 0")
        if epoch != self.epoch:
            self._place, self._is_ahead = Place(epoch, 0), False

    def state_dict(self) -> dict[str, Any]:
        """Returns the place and the order, equal on all ranks.

        Raises:
            InvalidArgument: a torch DataLoader with workers has taken samples ahead.
        """
        self._check_exact()
        epoch, position = self.place
        return {
            "epoch": epoch,
            # All samples: with `drop_last` another number of ranks would go on with some that are left out here.
            "position": position if position < self._end(position) else self._num_samples,
            "num_samples": self._num_samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the place of a state, which any number of ranks saved.

        Raises:
            InvalidArgument: the state is of another dataset, or of another order.
        """
        for name, mine in (("num_samples", self._num_samples), ("seed", self._seed), ("shuffle", self._shuffle)):
            if (saved := state.get(name)) != mine:
                raise InvalidArgument(
                    f"the state is of a sampler with {name}={saved}, and this one has {mine}: make it as the saved one"
                )
        epoch, position = state.get("epoch", -1), state.get("position", -1)
        if not (is_count(epoch) and is_count(position) and position <= self._num_samples):
            raise InvalidArgument(
                f"the state has epoch={epoch!r} and position={position!r}: load the result of state_dict()"
            )
        self._place, self._is_ahead, self._pass = Place(epoch, position), False, _LOADED

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("a DistributedSampler", name, dir(type(self)) if name[:1] != "_" else ())

    # For DataLoader, which counts the batches that the program has received

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside is a pass. Compares the place with that of all ranks first, and blocks until all have come.

        Raises:
            CollectiveMismatch: they differ.
        """
        # At the end of an epoch: from here on `take` counts in the next one.
        if self._pass is not _LOADED:
            self._place = self._after()
        self._check_equal()
        self._pass = this = object()
        try:
            yield
        finally:
            # Not if the program has begun another pass before it let go of this one.
            if self._pass is this:
                self._pass = None

    def _after(self) -> Place:
        """Returns the place at which the next pass begins, if the loop is left here."""
        epoch, position = self._place
        return self._place if position < self._end(position) else Place(epoch + 1, 0)

    def _check_equal(self) -> None:
        if self._group.world_size == 1:
            return
        mine = {"samples": self._num_samples, "seed": self._seed, "shuffle": self._shuffle, **self.place._asdict()}
        with self._group.backend.flight_recorder.within(PASS):
            told = self._group.all_gather_object(mine)
        for rank, other in enumerate(told):
            assert isinstance(other, dict)
            for name, value in mine.items():
                if other[name] != value:
                    raise CollectiveMismatch(
                        f"rank {self._group.rank} begins a pass with {name}={value}, and rank {rank} with {name}="
                        f"{other[name]}: give all ranks the same dataset and seed, and let all of them run each loop",
                        rank=self._group.ranks[rank],
                    )

    def left(self) -> range:
        """Returns this rank's places in the order of the epoch, from the present one on."""
        position = self.place.position
        return range(position + self._group.rank, self._end(position), self._group.world_size)

    def indices(self) -> list[int]:
        """Returns this rank's samples from the present place to the end of the epoch."""
        epoch, mine = self.place.epoch, self.left()
        if not self._shuffle:
            return list(mine)
        # A hash, not the sum that torch's sampler takes: seed 1 would begin with the second order of seed 0.
        generator = torch.Generator().manual_seed(stable_number(f"{self._seed}/{epoch}"))
        # The generator's device, whatever the default device is.
        order = torch.randperm(self._num_samples, generator=generator, device="cpu")
        return order[mine.start : mine.stop : mine.step].tolist()

    def take(self, count: int) -> None:
        """Counts samples as taken: `count` on each rank, fewer at the end of the epoch."""
        self._group.backend.dealt[self._group.ranks] += 1  # a pipeline sees there that its stages get other samples
        epoch, position = self._place
        self._place = Place(epoch, min(position + count * self._group.world_size, self._end(position)))

    def finish(self) -> None:
        """Ends a pass. The next one is the next epoch."""
        # `_is_ahead` stays: workers have taken all samples, and the program may not have got them yet.
        self._place = Place(self._place.epoch + 1, 0)

    @property
    def seed(self) -> int:
        """Seed of the orders."""
        return self._seed

    @property
    def rank(self) -> int:
        """This rank among the data-parallel ones."""
        return self._group.rank

    def _end(self, position: int) -> int:
        """Returns the number of samples after which the epoch ends, from a place in it."""
        return position + (self._num_samples - position) // self._unit * self._unit

    def _check_exact(self) -> None:
        if self._is_ahead:
            raise InvalidArgument(
                "workers of torch's DataLoader have taken samples ahead of the program, so the sampler's place is not "
                "exact: use echelon.data.DataLoader, which counts the batches that the program got"
            )


def _length_of(dataset: object) -> int:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise InvalidArgument(
            f"dataset is {named(dataset)}, without a length: give a dataset with __len__ and __getitem__, or deal out "
            "a stream by group.rank and group.world_size"
        )
    if isinstance(dataset, DataLoader):
        raise InvalidArgument(f"dataset is {named(dataset)}: give its samples, as loader.dataset")
    return len(dataset)
