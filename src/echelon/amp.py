"""Mixed precision: a gradient scaler whose ranks skip the same steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.arguments import is_factor, is_integral, named, refuse_others
from echelon.errors import InvalidArgument
from echelon.group.group import ProcessGroup, check_group

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for ranks that hold different gradients, as the stages of a Pipeline.

    If a gradient of one rank is infinite or not a number, all ranks of the group skip the step and lower the scale.
    torch's own scaler decides by the gradients of its rank: one stage would be stepped, and another not. With
    DistributedDataParallel all ranks have the same gradients, so torch's own is enough.

    Pass the ranks of the pipeline. Use it as torch's: in `loss_fn`, `scale` the loss of each microbatch; after `step`
    call `unscale_` if gradients are clipped, then `step` and `update`. Every rank calls them. The loss that the
    pipeline returns is scaled: divide it by `get_scale()` before `update`.
    """

    @refuse_others(process_group="group")
    def __init__(
        self,
        group: ProcessGroup,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """Makes the scaler of one rank.

        Args:
            group: the ranks that skip steps together.
            device: "cpu" or "cuda". None: the kind of the group's device.
            init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's.

        Raises:
            InvalidArgument: `group` is no group, `device` no text, or a number is of a wrong type or not above 0.
        """
        self._group = check_group(group)
        if not isinstance(device, str | None):
            raise InvalidArgument(f"device is of type {type(device).__name__}: give 'cpu', 'cuda' or None")
        factors = {"init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
        for name, value in factors.items() if enabled else ():
            if not is_factor(value):
                raise InvalidArgument(f"{name} is {named(value)}: give a number above 0")
        if enabled and not is_integral(growth_interval, 1):
            raise InvalidArgument(f"growth_interval is {named(growth_interval)}: give a number of steps, 1 or more")
        self._unscaled: set[int] = set()
        kind = group.device.type if device is None else device
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        # Ranks without a loss never call `scale`, which makes the scale.
        self.scale(torch.ones((), device=group.device if device is None else device))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale. Waits for all ranks: a bad gradient of one counts for all.

        Args:
            optimizer: the optimizer of this rank.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_reduce`.
            RuntimeError: torch's: a second call since the last `update`, or after `step`.
        """
        if not self.is_enabled():
            return
        parameters = [one for each in optimizer.param_groups for one in each["params"] if one.numel()]
        having = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in having:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        is_bad = self._agree([_values_of(parameter.grad) for parameter in having])
        # torch's scaler refuses an optimizer without any gradient, as that of a frozen stage: one gets zeros meanwhile.
        frozen = [] if having else parameters[:1]
        for parameter in frozen:
            parameter.grad = torch.zeros_like(parameter)
        if is_bad:
            for parameter in [*having, *frozen][:1]:
                _values_of(parameter.grad).fill_(torch.inf)  # the step is skipped by this rank's own check
        self._unscaled.add(id(optimizer))
        try:
            super().unscale_(optimizer)
        finally:
            for parameter in frozen:
                parameter.grad = None

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Makes the optimizer's step if the gradients of all ranks are finite. Waits for all ranks. Returns its result.

        Args:
            optimizer: the optimizer of this rank.
            args, kwargs: passed on to its `step`.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout: as `unscale_`.
            RuntimeError: torch's: a second call since the last `update`.
        """
        # torch leaves unscaling to optimizers with a kernel for it (fused=True), which know nothing of other ranks.
        if self.is_enabled() and id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale for the next step, on all ranks alike. Does not wait.

        Args:
            new_scale: the scale. None: grown or lowered by what happened since the last update.

        Raises:
            AssertionError: torch's: nothing was unscaled since the last update.
        """
        self._unscaled.clear()
        super().update(new_scale)

    def _agree(self, gradients: list[Tensor]) -> bool:
        """Returns whether any rank has a gradient that is not finite."""
        bad = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        flag = torch.tensor(float(bad), device=self._group.device)
        return bool(self._group.all_reduce(flag, "max").item())


def _values_of(gradient: Tensor) -> Tensor:
    """Returns the values of a gradient, which share its memory."""
    return gradient.values() if gradient.is_sparse else gradient
