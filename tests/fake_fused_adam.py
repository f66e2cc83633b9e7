"""Optimizers of Transformer Engine, computed by torch; see fake_transformer_engine.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

CALLS: list[tuple[str, tuple[int, ...]]] = []
"""Name of each computation and the shape of its input, in order."""


def refuse(**unsupported: Any) -> None:
    used = {name: value for name, value in unsupported.items() if value}
    assert not used, f"the fake has no {used}"


class FusedAdam(torch.optim.Optimizer):
    """With the library's state: moments per parameter, and one step count per group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse(amsgrad=amsgrad, capturable=capturable, master=master_weights)
        assert adam_w_mode
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        CALLS.append(("FusedAdam", ()))
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                assert set(state) == {"exp_avg", "exp_avg_sq"}, set(state)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(parameter.grad, 1 - first)
                square.mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                root = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] / (1 - first ** group["step"])
                parameter.addcdiv_(mean, root, value=-rate)


class FusedSGD(torch.optim.SGD):
    """Never used."""


class MultiTensorApply:
    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_scale(
    _: int, __: Any, lists: Sequence[Sequence[torch.Tensor]], scale: Any
) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(_: int, __: Any, lists: Sequence[Sequence[torch.Tensor]], *___: Any) -> Any:
    norms = torch._foreach_norm(list(lists[0]))
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None
