"""`train`: a model, data, and a reward, if the algorithm takes one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.api.functional import algorithm_named
from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fitting import TrainResult
from nemo_rl_core.trainers.peer_calls import FIT_ARGUMENTS


def train(  # noqa: PLR0913 (all that a run is made of)
    model: str | Path | ModelConfig,
    dataset: Any = None,
    *,
    reward_fn: Any = None,
    reward_weights: Sequence[float] | None = None,
    algorithm: str = "grpo",
    validation: Any = None,
    reference: str | Path | ModelConfig | None = None,
    callbacks: Sequence[Callback] = (),
    name: str | None = None,
    tracking: TrackingConfig | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> TrainResult:
    """Trains a model.

    Args:
        model: A hub name, a folder in the transformers layout, or the config of a model.
        dataset: A hub name, a file or folder, a list of dicts, a `datasets.Dataset`.
        reward_fn: A function of `completion` and what it names of the row (`prompt`, `answer`,
            `metadata`, any column), one of lists of these, a list of such functions, or an
            environment.
        reward_weights: Of the functions of a list; None weighs each by 1.
        algorithm: Its name, or that of a preset of GRPO, such as `rloo`; an unknown one lists the
            choices.
        validation: Rows that are never trained on; None holds some of `dataset` out.
        reference: The reference or teacher; None takes the model itself.
        callbacks: Called in order at each hook.
        name: Of the run: an interrupted one of the same name and inputs is continued.
        tracking: Trackers besides the run's record; see `BaseTrainer.fit`.
        **overrides: `train_dataset`, `eval_dataset` and `reward_funcs` as TRL calls them; how the
            data's columns are read (`columns`, `answer_pattern`, `format`, `system_prompt`,
            `prompt_template`, `drop_columns`, `task`: see `DataModule.of`); and settings by name:
            see `BaseTrainer.from_pretrained`.

    Returns:
        The history of metrics, the checkpoint, and where it came from.

    Raises:
        NemoRLError: For what cannot be used, before any worker starts.

    Example:
        >>> result = train(                                                  # doctest: +SKIP
        ...     model="Qwen/Qwen2.5-1.5B",
        ...     dataset="organization/prompts",
        ...     reward_fn=lambda prompt, response: float("correct" in response),
        ... )
    """
    of_fit = RowFormat.accepted_keys() | set(FIT_ARGUMENTS)
    given = {key: overrides.pop(key) for key in of_fit & overrides.keys()}
    found = algorithm_named(algorithm, overrides)
    trainer = found.trainer.from_pretrained(model, **found.overrides)
    return trainer.fit(
        dataset,
        reward_fn=reward_fn,
        reward_weights=reward_weights,
        validation=validation,
        reference=reference,
        callbacks=callbacks,
        name=name,
        tracking=tracking,
        **given,
    )
