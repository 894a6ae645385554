"""The interface between an engine and an optimizer: the optimizer creates and names its own state."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from parallel.sharded import plain


class EngineOptimizer(Optimizer):
    """A torch optimizer that creates and names its own state. A subclass implements `new_state` and `step`.

    Engines and checkpoints take the state as they find it, so a new optimizer needs no change in them."""

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of one parameter before the first step, by name; for example `step`, `exp_avg`, `exp_avg_sq`.

        Each tensor either has the parameter's shape (`torch.zeros_like`) or has no dimension. `step` is a
        zero-dimensional fp32 tensor on the parameter's device, so counting steps never waits for the device. Under ZeRO
        the parameter is a flat tensor that holds parts of many parameters."""
        raise NotImplementedError

    def create_state(self) -> None:
        """Fill `self.state` for all parameters. Engines call it before the first step: a checkpoint may need it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.new_state(plain(parameter.detach()), group)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of each group: `lr` times the group's own `lr_scale`, if it has one."""
        for group in self.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`."""
        _undecorated(Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer`."""
        _undecorated(Optimizer.zero_grad)(self, set_to_none)


def _undecorated(method: Any) -> Any:
    """The method without its decorator, which imports torch's compiler to exclude the method from compilation."""
    return getattr(method, "__wrapped__", method)
