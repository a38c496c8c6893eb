"""Synchronisation of one module's gradients: hooks on the module and its parameters report, and the reducer is driven.

The hooks are on the module and its parameters, so it does not matter whether the wrapper or the module was called. They
hold the synchronisation weakly. The hooks of a copied, or saved and loaded, module report to nobody.

A forward in training needs a backward, so it counts as soon as it has ended well: one that failed may be retried. A
forward in evaluation counts when a backward reaches its output, if ever. An optimizer is recognised by its parameters'
hooks, so it may be made before or after the wrapper. A step compiled by torch.compile calls no hook; it counts in a
tensor that is an attribute of the parameters.

Buckets are planned for the parameters that are trained at a forward. Frozen and removed ones have hooks as well, and
the first gradient of a backward compares again if there was no forward: a program may call submodules alone, or lend
the module other parameters for a call. All ranks then plan anew before the first reduction of that backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from echelon._torch_private.autograd import at_end_of_backward, hooks_after_gradient
from echelon._torch_private.modules import never_compiled
from echelon.data_parallel.broadcast import Buffers, broadcast_tensors, check_same_model, synchronize_buffers
from echelon.data_parallel.equal_batches import joined
from echelon.data_parallel.hooks import GradientHook
from echelon.data_parallel.idle_optimizer import OF_DDP, IdleOptimizer
from echelon.data_parallel.join import Joining, Next, first_active
from echelon.data_parallel.missing_zero_grad import MissingZeroGrad
from echelon.data_parallel.reducer import Average, GradientReducer, can_overlap
from echelon.data_parallel.sync_batchnorm import Samples, Shares, SyncBatchNorm
from echelon.errors import UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.purposes import FORWARD

_COMPILED_STEPS = "_echelon_compiled_steps"
"""Attribute of a parameter that holds the counter of its `GradientSync` for compiled optimizer steps."""


class ParamSnapshot:
    """Snapshot of a module's parameters, and the hooks on them."""

    def __init__(self, module: torch.nn.Module, before: ParamSnapshot | None = None) -> None:
        """Records the present parameters and which of them require gradients. `before`: the earlier snapshot."""
        self._module = module
        self.named = list(module.named_parameters())
        self.trainable = [(name, parameter) for name, parameter in self.named if parameter.requires_grad]
        self._requires_grad = [parameter.requires_grad for _, parameter in self.named]
        earlier = [] if before is None else [*before.parameters, *before.others]
        known = {id(parameter) for _, parameter in self.trainable}
        others = {id(one): one for one in (*self.parameters, *earlier) if id(one) not in known}
        # Weak references: a parameter that the program has replaced must not keep its memory.
        self._others = [weakref.ref(parameter) for parameter in others.values()]
        self.handles: list[RemovableHandle] = []
        """Handles of the hooks, for `release`."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters, frozen ones too."""
        return [parameter for _, parameter in self.named]

    @property
    def others(self) -> list[torch.nn.Parameter]:
        """Parameters, present and earlier, that are not trained now."""
        return [parameter for other in self._others if (parameter := other()) is not None]

    def is_current(self) -> bool:
        """Whether the module still has the same parameters, and trains the same ones."""
        # Runs before every forward, so it compares identities and flags only, and skips the names.
        now = list(self._module.parameters())
        return len(now) == len(self.named) and all(
            parameter is known and parameter.requires_grad == trainable
            for parameter, (_, known), trainable in zip(now, self.named, self._requires_grad, strict=True)
        )

    def is_replaced_for_a_call(self) -> bool:
        """Whether the module has tensors that are no parameters, which torch.func.functional_call lends it."""
        return not all(isinstance(parameter, nn.Parameter) for parameter in self._module.parameters())

    def index_of(self, parameter: Tensor) -> int | None:
        """Returns the number of a trained parameter. None if it is not trained."""
        return next((index for index, (_, known) in enumerate(self.trainable) if known is parameter), None)

    def trains_all_of(self, earlier: ParamSnapshot) -> bool:
        """Whether all parameters that the earlier snapshot trained are trained still."""
        known = {id(parameter) for _, parameter in self.trainable}
        return all(id(parameter) in known for _, parameter in earlier.trainable)

    def added_since(self, earlier: ParamSnapshot) -> list[torch.nn.Parameter]:
        """Returns the parameters that the earlier snapshot lacks."""
        known = set(map(id, earlier.parameters))
        return [parameter for parameter in self.parameters if id(parameter) not in known]

    def release(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


class GradientSync:
    """Synchronisation of a module's gradients and buffers in forward and backward."""

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        *,
        bucket_mb: float,
        buffers: Buffers,
        average: Average,
        hook: GradientHook | None,
        options: list[str],
    ) -> None:
        """Makes the reducer, without parameters until `watch`. Blocks until all ranks have.

        Args:
            module: the module.
            group: the ranks.
            bucket_mb, buffers, average, hook: as for DistributedDataParallel.
            options: the options as lines of text, which must be equal on all ranks.
        """
        self.module = module
        self.hook = hook
        self.is_on = True
        """Whether backward reduces gradients, and forward synchronises buffers: not under `no_sync`."""
        self.reducer = GradientReducer((), group, bucket_mb=bucket_mb, average=average, hook=hook, learns_order=True)
        self.joining = Joining(self.reducer.group)
        self._weighs_samples = average == "samples" and not self.reducer.leaves_gradients
        self.samples: Samples | None = None
        """Samples of the forward that runs, for its SyncBatchNorms. None: all ranks count equally."""
        self._shares = Shares()
        _count_samples(module, None)
        if self._weighs_samples:
            # Without this wrapper nobody weighs gradients by samples any more.
            weakref.finalize(self, _stop_counting, weakref.ref(module)).atexit = False
        self.num_missed_updates = 0
        """Reductions of other ranks under `join` after which this rank has not stepped its optimizer."""
        self._buffers_are = buffers
        self._bucket_mb = bucket_mb
        self._options = options
        self._overlaps = True
        self.missing_zero_grad = MissingZeroGrad(group.rank)
        self._idle_optimizer = IdleOptimizer(module.parameters, f"rank {group.rank}: {OF_DDP}")
        self._is_armed = False
        self._is_prepared = False
        self._is_compared = False
        """Whether the parameters were compared with the snapshot since the last backward."""
        self._has_unreduced = False
        """Whether gradients were accumulated under `no_sync` since the last reduction."""
        self.has_unused = False
        """Whether gradients were accumulated under `no_sync` since the last reduction and the last optimizer step."""
        self._watched: ParamSnapshot | None = None

    def watch(self) -> None:
        """Plans buckets for the parameters that require gradients now, and hooks them. Blocks until all ranks have.

        Raises:
            UnsupportedOp: another wrapper reduces one of them.
        """
        before = self._watched
        now = ParamSnapshot(self.module, before)
        if before is not None:
            before.release()
        take_over(now.named)
        group = self.reducer.group
        if before is not None and not now.trains_all_of(before):
            self._reduce_rest()
        if before is not None and (late := now.added_since(before)):
            # In the reducer's group: if only this rank has new parameters, the others are in a reduction there, so
            # the calls meet and raise CollectiveMismatch.
            check_same_model(self.module, group, self._options)
            broadcast_tensors(late, group, bucket_mb=self._bucket_mb)
        self._watched = now
        self.reducer.plan(now.trainable)
        if self.reducer.is_needed:
            now.handles = [*self._hook_parameters(now), *self._hook_module()]

    def reduce(self) -> None:
        """Reduces all gradients. Blocks; see `GradientReducer.reduce`."""
        self.joining.announce(Next.REDUCTION)
        self._is_prepared = self._has_unreduced = self.has_unused = False
        self._shares = Shares()
        self.reducer.reduce()

    def shadow(self, step: Next, src: int) -> None:
        """Takes part in a step of the ranks that still have batches, without gradients of its own. Blocks."""
        if step != Next.REDUCTION:
            self._prepare_forward(src)
            return
        for parameter in self.module.parameters():
            parameter.grad = None
        self.reducer.reduce()

    def give_up(self) -> bool:
        """Releases the parameters if a reduction has failed, so that another wrapper may have them. True if it did."""
        if self.reducer.is_closed and self._watched is not None:
            self._watched.release()
        return self.reducer.is_closed

    # Called by the hooks

    @never_compiled
    def before_forward(self) -> None:
        """A forward that records a graph begins. May block."""
        watched = self._watched
        if watched is None or not (watched.is_current() or watched.is_replaced_for_a_call()):
            self.watch()
        self._is_compared = True
        if self._weighs_samples:
            self.samples = Samples(shares=self._shares)
            _count_samples(self.module, self.samples)
        # Once per forward that ends well: the other ranks do not know that one failed and is retried, so a second
        # round of collectives would find no partner.
        if self.module.training and self.is_on and not self._is_prepared:
            self._prepare_forward(first_active(self.joining.announce(Next.FORWARD)) or 0)
            self._is_prepared = True

    def on_forward(self, num_samples: int, batch: int) -> None:
        """A forward counts. Called after it, or in a backward pass.

        Args:
            num_samples: number of its samples.
            batch: the number that stands for its inputs, see `EqualBatches`.
        """
        self._is_prepared = False
        counts = self.reducer.counts
        # A step may have several forwards, such as of each rank's samples and of the same noise on all ranks.
        counts.batch = batch if counts.batch is None else joined(counts.batch, batch)
        counts.num_samples += num_samples
        counts.num_forwards += self.is_on

    def on_output_gradient(self) -> None:
        """A gradient has reached the module's output. Called before any gradient of a parameter."""
        if not self._is_armed:
            self.missing_zero_grad.on_backward(self.module.parameters())
            self._idle_optimizer.check()
        self.on_backward()

    def on_backward(self) -> None:
        """A backward pass has begun. Called inside that pass, many times."""
        if not self._is_armed:
            self._is_armed = True
            at_end_of_backward(self._on_end, self._on_failure)

    def before_gradient(self, index: int) -> None:
        """A gradient is complete. Autograd adds it to .grad next, unless it is for torch.autograd.grad."""
        self.on_backward()
        self.reducer.buckets.detach_rounded(index)

    def on_gradient(self, index: int) -> None:
        """A gradient has been added to .grad. Launches full buckets."""
        reducer = self.reducer
        if self.missing_zero_grad.used and self._watched is not None:
            self.missing_zero_grad.on_gradient(self._watched.trainable[index][1])
        if not self.is_on:
            self._has_unreduced = self.has_unused = True
            reducer.buckets.store(index)
            return
        if not self._is_armed:
            self.on_backward()
        if reducer.reduction is None:
            # A program that calls submodules, never the module, trains other parameters without a forward in between.
            if not self._is_compared:
                self._is_compared = True
                if (found := self._index_after_watch(index)) is None:
                    return
                index = found
            self.joining.announce(Next.REDUCTION)
            # Asked anew for each backward: the number of torch's threads may have changed.
            self._overlaps = can_overlap(reducer.group)
        reducer.ready(index, self._overlaps)

    def on_other_gradient(self, parameter: Tensor) -> None:
        """A parameter without a bucket has got a gradient: it was frozen, or not in the module, at the last `watch`.

        Raises:
            UnsupportedOp: other gradients of this backward are being reduced already.
        """
        assert self._watched is not None
        if not self.is_on:
            self._has_unreduced = self.has_unused = True
            return
        if self._watched.is_current():
            return  # it is not in the module any more
        if self.reducer.reduction is not None:
            name = next((name for name, known in self.module.named_parameters() if known is parameter), "")
            raise UnsupportedOp(
                f"parameter {name!r} has a gradient, but was frozen or not in the module at its last forward: unfreeze "
                "or add parameters before the forward"
            )
        self.watch()
        self._is_compared = True
        if (index := self._watched.index_of(parameter)) is not None:
            self.on_gradient(index)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step on the parameters.

        Raises:
            UnsupportedOp: the step was made inside of a backward, with gradients that are not reduced yet.
        """
        if self._is_armed and self.is_on and not self.reducer.leaves_gradients:
            raise UnsupportedOp(
                "an optimizer made a step inside of backward, where gradients are not reduced yet: call its step() "
                "after backward(), not in a hook of a parameter"
            )
        self.has_unused = False
        self.reducer.counts.num_called_steps += 1
        self.missing_zero_grad.on_step(optimizer)
        self.reducer.equal_batches.on_step()

    # Inside

    def _index_after_watch(self, index: int) -> int | None:
        """Plans anew if the parameters have changed. Returns a parameter's new number, None if it has no bucket."""
        assert self._watched is not None
        if self._watched.is_current():
            return index
        _, parameter = self._watched.trainable[index]
        self.watch()
        return self._watched.index_of(parameter)

    def _reduce_rest(self) -> None:
        """Reduces gradients that a rank has accumulated under `no_sync`. Blocks; every rank must call it."""
        reducer = self.reducer
        if not reducer.is_needed or reducer.leaves_gradients:
            return
        rest = torch.tensor(int(self._has_unreduced), device="cpu")
        if reducer.group.all_reduce(rest, "max").item():
            self._has_unreduced = self.has_unused = False
            reducer.reduce()

    def _on_end(self) -> None:
        self._is_armed = self._is_compared = False
        reducer = self.reducer
        reducer.buckets.restore_rounded()
        # No reduction has begun after torch.autograd.grad, which sets no parameter's .grad.
        if reducer.reduction is not None:
            self._has_unreduced = self.has_unused = False
            self._shares = Shares()
            reducer.start()
            # `finish` blocks, so it goes to the end of the queue: other models in this backward start their buckets
            # first. Ranks may come to two models in different orders, and would wait for each other.
            at_end_of_backward(reducer.finish, reducer.abandon)

    def _on_failure(self) -> None:
        self._is_armed = False
        self.reducer.buckets.restore_rounded()
        self.reducer.abandon()

    def _prepare_forward(self, src: int) -> None:
        """Runs the hook's `before_forward`, then synchronises the buffers, from rank `src`. Blocks."""
        group = self.reducer.group
        with group.backend.flight_recorder.within(FORWARD, self.reducer.step):
            if self.hook is not None:
                assert self._watched is not None
                # Not the module's own list, which torch.func.functional_call replaces during a call.
                self.hook.before_forward(self._watched.parameters, group)
            synchronize_buffers(list(self.module.buffers()), self._buffers_are, group, src, self._bucket_mb)

    def _hook_parameters(self, watched: ParamSnapshot) -> Iterator[RemovableHandle]:
        # The second hook per parameter is only for rounded gradients, which autograd must not add to.
        is_wide = self.hook is not None and self.hook.dtype is not None
        for index, (_, parameter) in enumerate(watched.trainable):
            hook = _GradientHook(self, index)
            yield parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            # Not for GPU parameters: a CPU tensor among them would cost the compiled step its CUDA graph.
            if parameter.device.type == "cpu":
                setattr(parameter, _COMPILED_STEPS, self.reducer.counts.compiled_steps)
            if is_wide:
                yield parameter.register_hook(hook.before)  # type: ignore[no-untyped-call]
        for parameter in watched.others:
            if (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference():
                yield _hook_even_if_frozen(parameter, _OtherHook(self))

    def _hook_module(self) -> Iterator[RemovableHandle]:
        hook = _ForwardHook(weakref.ref(self))
        yield self.module.register_forward_pre_hook(hook.before)
        yield self.module.register_forward_hook(hook.after, with_kwargs=True)


def take_over(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Takes these parameters from wrappers that have failed.

    Raises:
        UnsupportedOp: a wrapper that has not failed has one of them. Each would read gradients that the other reduces.
    """
    for name, parameter in named:
        for hook in hooks_after_gradient(parameter):
            if isinstance(hook, _GradientHook) and (sync := hook.sync()) and not sync.give_up():
                raise UnsupportedOp(
                    f"the gradient of parameter {name!r} is reduced by another DistributedDataParallel already: wrap "
                    "each module once, or del the other wrapper first"
                )


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        _count_compiled_step(optimizer)
        return
    parameters = (parameter for each in optimizer.param_groups for parameter in each["params"])
    hooks = (hook for parameter in parameters for hook in hooks_after_gradient(parameter))
    told = {id(sync): sync for hook in hooks if isinstance(hook, _GradientHook) and (sync := hook.sync())}
    for sync in told.values():
        sync.on_step(optimizer)


def _count_compiled_step(optimizer: torch.optim.Optimizer) -> None:
    # torch.compile traces this function into the step, so it may only use tensors and plain Python: a weak reference
    # would break fullgraph=True.
    counts: list[torch.Tensor] = []
    for each in optimizer.param_groups:
        for parameter in each["params"]:
            count = getattr(parameter, _COMPILED_STEPS, None)
            if count is not None and not any(count is other for other in counts):
                counts.append(count)
    for count in counts:
        count.add_(1)


class _GradientHook:
    def __init__(self, sync: GradientSync, index: int) -> None:
        self.sync = weakref.ref(sync)
        self._index = index

    def before(self, _: Tensor) -> None:
        if sync := self.sync():
            sync.before_gradient(self._index)

    def __call__(self, _: Tensor) -> None:
        if sync := self.sync():
            sync.on_gradient(self._index)


class _OtherHook:
    def __init__(self, sync: GradientSync) -> None:
        self._sync = weakref.ref(sync)

    def __call__(self, parameter: Tensor) -> None:
        if sync := self._sync():
            sync.on_other_gradient(parameter)


def _hook_even_if_frozen(parameter: Tensor, hook: _OtherHook) -> RemovableHandle:
    """Registers a hook that is called after each gradient, once the parameter requires one."""
    before = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses hooks of tensors that require no gradient, and keeps earlier ones
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(before)
    return handle


def _count_samples(module: nn.Module, samples: Samples | None) -> None:
    """Lets the SyncBatchNorms of a module weigh ranks by these samples. None: all ranks count equally."""
    for each in module.modules():
        if isinstance(each, SyncBatchNorm):
            each.samples = samples


def _stop_counting(module: weakref.ref[nn.Module]) -> None:
    if (found := module()) is not None:
        _count_samples(found, None)


class _ForwardHook:
    def __init__(self, sync: weakref.ref[GradientSync] | None) -> None:
        self._sync = sync

    # A weak reference cannot be pickled, and the module with its hooks must be: deepcopy and torch.save go this way.
    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[None]]:
        return _ForwardHook, (None,)

    def _told(self) -> GradientSync | None:
        return self._sync() if self._sync is not None and torch.is_grad_enabled() else None

    def before(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        if sync := self._told():
            sync.before_forward()

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if sync := self._told():
            self._passed(sync, module, args, kwargs, output)

    @never_compiled
    def _passed(
        self, sync: GradientSync, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        inputs = list(_leaves_of([*args, *kwargs.values()]))
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        num_samples = len(tensors[0]) if tensors and tensors[0].dim() else 0
        if sync.samples is not None:
            sync.samples.number = num_samples
        watch = sync.reducer.equal_batches
        batch = 0 if watch.is_done else watch.number_of(inputs)
        passed = _Forward(sync, num_samples, batch)
        if module.training:
            passed.count()
        for value in _leaves_of(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(passed.on_gradient)  # type: ignore[no-untyped-call]


class _Forward:
    """One forward. The hooks on its output tensors refer to it."""

    def __init__(self, sync: GradientSync, num_samples: int, batch: int) -> None:
        self._sync = weakref.ref(sync)
        self._num_samples, self._batch = num_samples, batch
        self._has_counted = False

    def count(self) -> None:
        sync = self._sync()
        if sync and not self._has_counted:
            self._has_counted = True  # a forward counts once, however many outputs and backwards it has
            sync.on_forward(self._num_samples, self._batch)

    def on_gradient(self, _: Tensor) -> None:
        self.count()
        if sync := self._sync():
            sync.on_output_gradient()


def _leaves_of(value: Any) -> Iterator[Any]:
    """Yields the values in nested tuples, lists and mappings."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves_of(item)
    else:
        yield value


# One hook for all optimizers of the process, which finds the wrappers through the parameters. Once, and for good: torch
# iterates over its global hooks, so one that comes or goes meanwhile is an error.
register_optimizer_step_post_hook(_after_step)
