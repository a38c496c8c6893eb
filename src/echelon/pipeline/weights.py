"""The parameters of the stages that one rank holds, under the names of the unsplit model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from echelon.group import ProcessGroup
from echelon.pipeline.stage import Stage


class Weights:
    """Names, saves, loads and clips what the stages of this rank hold."""

    def __init__(self, stages: Sequence[Stage], group: ProcessGroup) -> None:
        """Looks at the stages; nothing is copied.

        Args:
            stages: this rank's.
            group: the ranks of the pipeline.
        """
        self._stages = stages
        self._group = group

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters under their names in the unsplit model."""
        for stage in self._stages:
            for name, parameter in stage.module.named_parameters():
                yield stage.prefix + name, parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this rank's part of the unsplit model's state dict."""
        return {
            stage.prefix + name: value for stage in self._stages for name, value in stage.module.state_dict().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's part of a state dict of the unsplit model; the other stages' entries are passed over.

        Raises:
            KeyError: an entry of this rank's stages is missing.
        """
        missing = sorted(set(self.state_dict()) - set(state_dict))
        if missing:
            raise KeyError(
                f"the state dict has no {', '.join(missing)}: give that of the whole model, or of these stages"
            )
        for stage in self._stages:
            names = stage.module.state_dict()
            stage.module.load_state_dict({name: state_dict[stage.prefix + name] for name in names})

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their 2-norm over all stages is at most `max_norm`; returns what it was."""
        gradients = [parameter.grad for _, parameter in self.named_parameters() if parameter.grad is not None]
        squares = [gradient.double().square().sum() for gradient in gradients]
        total = torch.stack(squares).sum().reshape(1) if squares else torch.zeros(1, dtype=torch.float64)
        norm = self._group.all_reduce(total).sqrt()[0]
        factor = min(1.0, float(max_norm / (norm + 1e-6)))
        if factor < 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        return norm
