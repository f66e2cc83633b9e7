"""Custom advantages: functions that name the columns that they read as their parameters."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.custom_loss import kind_of
from nemo_rl_core.functional.masked import zero_masked

OF_SEQUENCES: Final = (
    "rewards",
    "groups",
    "truncated",
    "rollout_lengths",
    "reward_components",
    "num_turns",
)
"""Parameters of an advantage of GRPO, for each sequence."""
OF_TOKENS: Final = ("token_mask", "input_ids", "generation_logprobs")
"""Parameters of an advantage of GRPO, for each token."""
OF_CRITIC: Final = ("rewards", "values", "mask", "last_values", "truncated")
"""Parameters of an advantage of PPO."""
_TOLERANCE: Final = 1e-4


@dataclass(frozen=True)
class AdvantageFunction:
    """A custom advantage, whose results are checked.

    Attributes:
        fn: The custom function.
        name: Name of the function in messages.
    """

    fn: Callable[..., Any]
    name: str

    @property
    def reads_tokens(self) -> bool:
        """Whether a parameter is a column with one value per token."""
        return any(name in OF_TOKENS for name in inspect.signature(self.fn).parameters)

    def refuse_parameters(self, known: Collection[str]) -> None:
        """Refuses a required parameter that is not a column."""
        unknown = [name for name in self._required() if name not in known]
        parameters = inspect.signature(self.fn).parameters
        if unknown or "rewards" not in parameters:
            raise ConfigError(
                f"the advantage {self.name} has parameters that are not columns",
                expected=f"rewards, and any of {', '.join(known)}",
                got=f"({', '.join(map(str, parameters.values()))})",
                fix="name each parameter after the column that it reads, also those of *args and "
                "**kwargs, or give it a default",
            )

    def of_group(self, columns: Mapping[str, Any], *, mask: Tensor | None) -> Tensor:
        """Returns the advantages of a full step of GRPO.

        Args:
            columns: The columns of `OF_SEQUENCES` and, with a mask, of `OF_TOKENS`.
            mask: `[B, T-1]` bool, valid tokens; None if the tokens are remote.

        Returns:
            `[B]`, or with a mask `[B, T-1]`, 0 at masked tokens.
        """
        advantages: Tensor = self._called(columns)
        num_rows = len(columns["rewards"])
        shapes = {"[B]": (num_rows,)} | ({} if mask is None else {"[B, T-1]": tuple(mask.shape)})
        self._refuse_unfit(advantages, shapes, mask)
        if mask is None:
            return advantages.float()
        by_token = advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages
        return zero_masked(by_token.float(), mask)

    def of_critic(self, columns: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns advantages and returns of a rank's rows of PPO, `[B, T-1]`, 0 if masked."""
        mask = columns["mask"]
        if not len(mask):
            return columns["values"].clone(), columns["values"].clone()
        full = self._of_critic(columns)
        for rows in torch.arange(len(mask)).tensor_split(2) if len(mask) > 1 else ():
            part = self._of_critic({name: value[rows] for name, value in columns.items()})
            pairs = zip(full, part, strict=True)
            if not all(
                torch.allclose(a[rows], b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in pairs
            ):
                raise ConfigError(
                    f"the advantage {self.name} depends on the other rows of the batch",
                    expected="advantages and returns of each row from this row only, since each "
                    "rank calls the function with its rows",
                    got="other values for a part of the rows",
                    fix="leave out means over rows: advantages are whitened over the step "
                    "afterwards",
                )
        return full

    def _of_critic(self, columns: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        returned, mask = self._called(columns), columns["mask"]
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ConfigError(
                f"the advantage {self.name} returned a wrong type",
                expected="(advantages, returns), [B, T-1] each",
                got=kind_of(returned),
                fix="return advantages, advantages + values",
            )
        for each in returned:
            self._refuse_unfit(each, {"[B, T-1]": tuple(mask.shape)}, mask)
        return zero_masked(returned[0].float(), mask), zero_masked(returned[1].float(), mask)

    def _called(self, columns: Mapping[str, Any]) -> Any:
        parameters = inspect.signature(self.fn).parameters
        missing = [name for name in self._required() if name not in columns]
        if missing:
            raise ConfigError(
                f"the advantage {self.name} reads a column that this run does not have",
                expected=f"any of {', '.join(columns)}",
                got=", ".join(missing),
                fix="remove the parameter, or give it a default",
            )
        return self.fn(**{name: columns[name] for name in parameters if name in columns})

    def _required(self) -> list[str]:
        parameters = inspect.signature(self.fn).parameters.values()
        return [each.name for each in parameters if each.default is each.empty]

    def _refuse_unfit(
        self, values: Any, shapes: Mapping[str, tuple[int, ...]], mask: Tensor | None
    ) -> None:
        if not isinstance(values, Tensor) or tuple(values.shape) not in shapes.values():
            raise ConfigError(
                f"the advantage {self.name} returned a wrong type or shape",
                expected=" or ".join(f"{name} = {list(shape)}" for name, shape in shapes.items()),
                got=kind_of(values),
                fix="return a tensor with one value for each sequence or token; for tokens read "
                "the parameter token_mask",
            )
        valid = values[mask] if mask is not None and values.shape == mask.shape else values
        if not values.is_floating_point() or not valid.isfinite().all():
            raise ConfigError(
                f"the advantage {self.name} returned values that are not finite numbers",
                expected="finite floating-point numbers",
                got=str(values.dtype) if not values.is_floating_point() else "NaN or infinity",
                fix="add a small number to a divisor that may be 0, as in (std + 1e-6); the std "
                "of one value is NaN",
            )
