"""What of a training module's whole tensors this rank holds."""

import torch

from rlix.engine.train.adapters import Exported, exported
from rlix.engine.weights.publication import named_weights
from rlix.nn import BaseTrainModule


class Parts:
    """As it is where each rank has whole tensors, or DTensors that say themselves what they are a part of."""

    def part(self, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """What `tensor` (a parameter, a buffer, or optimizer state of a parameter's shape) is of the whole one.

        A DTensor over the same memory where this rank holds a part, else the tensor itself. Does not communicate.
        """
        return tensor

    def named(self, module: BaseTrainModule) -> dict[str, torch.Tensor]:
        """The module's state dict, each tensor as `part` of its whole, one object for each of a tied tensor's names."""
        named = named_weights(module)
        parts = {id(tensor): _alike(tensor, self.part(tensor, tensor)) for tensor in named.values()}
        return {name: parts[id(tensor)] for name, tensor in named.items()}

    def exports(self, module: BaseTrainModule) -> list[Exported]:
        """The weights under the names that others know them by; tensors come one by one, as they are asked for.

        What `Exported.tensor` gives is a whole tensor, or a DTensor that one dimension of its mesh cuts. All ranks ask
        for all of them, in the order of the list, so to compute one may take a collective.
        """
        return exported(module)


def _alike(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """What is said of a parameter is one too: buffers are published in the type they have."""
    if isinstance(part, torch.nn.Parameter) or not isinstance(tensor, torch.nn.Parameter):
        return part
    return torch.nn.Parameter(part, requires_grad=False)
