"""AdamW over all ranks' parameters: shared ones kept equal, clipping by the norm of the whole model."""

from collections.abc import Iterable

import torch
from torch import nn

from terapipe.engine.mesh import Mesh


class Optimizer:
    """AdamW of one rank's stages.

    Parameters that several ranks hold (a tied embedding) get the sum of their gradients and count
    once in the norm. Several stages on one rank share the parameter itself.
    """

    def __init__(self, mesh: Mesh, modules: Iterable[nn.Module], learning_rate: float, clip_grad_norm: float | None) -> None:
        self.mesh, self.clip_grad_norm = mesh, clip_grad_norm
        self.parameters = share_parameters(modules)
        holders: dict[str, list[int]] = {}
        for rank, names in enumerate(mesh.gather(list(self.parameters))):
            for name in names:
                holders.setdefault(name, []).append(rank)
        self.shared = {name: tuple(ranks) for name, ranks in sorted(holders.items()) if len(ranks) > 1}
        for ranks in sorted(set(self.shared.values())):
            mesh.group_of(ranks)  # every rank takes part in making a group, in the same order
        self.owned = [name for name in self.parameters if holders[name][0] == mesh.rank]
        for parameter in self.parameters.values():
            # Gradients exist from the start: every backward then adds, whichever slice comes first.
            parameter.grad = torch.zeros_like(parameter)
        self.adam = torch.optim.AdamW(self.parameters.values(), lr=learning_rate)

    def reduce_shared(self) -> None:
        """Sum the gradients of shared parameters over their ranks."""
        for name, ranks in self.shared.items():
            if self.mesh.rank in ranks:
                gradient = self.parameters[name].grad
                assert gradient is not None
                self.mesh.sum(gradient, ranks)

    def grad_norm(self) -> float:
        """Norm of the whole model's gradient, each parameter counted once."""
        squares = [
            gradient.double().pow(2).sum() for name in self.owned if (gradient := self.parameters[name].grad) is not None
        ]
        return float(self.mesh.sum(torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)).sqrt())

    def step(self) -> float:
        """Reduce, clip, update, and clear; return the norm before clipping."""
        self.reduce_shared()
        norm = self.grad_norm()
        if self.clip_grad_norm is not None and norm > self.clip_grad_norm:
            for parameter in self.parameters.values():
                assert parameter.grad is not None
                parameter.grad.mul_(self.clip_grad_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self.adam.step()
        self.clear()
        return norm

    def clear(self) -> None:
        """Set every gradient to zero."""
        self.adam.zero_grad(set_to_none=False)


def share_parameters(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """All parameters by name; modules that name the same one get the same object."""
    found: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters()):
            owner_name, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner_name), last, found.setdefault(name, parameter))
    return found
