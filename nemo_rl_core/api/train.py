"""`train`: trains a model on data, with a reward if the algorithm uses one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.api.functional import algorithm_named
from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.trainers.fit.peer_calls import FIT_ARGUMENTS


def train(  # noqa: PLR0913 (all parts of a run)
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
        reward_fn: A function of `completion` and of columns of the row by name (`prompt`, `answer`,
            `metadata`, any other), a function of lists of these, a list of such functions, or an
            environment.
        reward_weights: Weights of a list of functions; None weighs each by 1.
        algorithm: Name of an algorithm or of a preset of GRPO, such as `rloo`; the error for an
            unknown name lists the choices.
        validation: Rows that are never trained on; None splits some off `dataset`.
        reference: The reference or teacher model; None uses the model itself.
        callbacks: Called in order at each hook.
        name: Name of the run; an interrupted run of the same name and inputs is continued.
        tracking: Trackers in addition to the run's record; see `BaseTrainer.fit`.
        **overrides: `train_dataset`, `eval_dataset` and `reward_funcs`, the same as in TRL; options
            for reading the data's columns (`columns`, `answer_pattern`, `format`, `system_prompt`,
            `prompt_template`, `drop_columns`, `task`: see `DataModule.of`); and settings by name:
            see `BaseTrainer.from_pretrained`.

    Returns:
        The metrics, the checkpoint and its lineage.

    Raises:
        NemoRLError: For unusable inputs, before any worker starts.

    Example:
        >>> result = train(                                                  # doctest: +SKIP
        ...     model="Qwen/Qwen2.5-1.5B",
        ...     dataset="organization/prompts",
        ...     reward_fn=lambda prompt, response: float("correct" in response),
        ... )
    """
    fit_options = RowFormat.accepted_keys() | set(FIT_ARGUMENTS)
    options = {key: overrides.pop(key) for key in fit_options & overrides.keys()}
    chosen = algorithm_named(algorithm, overrides)
    trainer = chosen.trainer.from_pretrained(model, **chosen.overrides)
    return trainer.fit(
        dataset,
        reward_fn=reward_fn,
        reward_weights=reward_weights,
        validation=validation,
        reference=reference,
        callbacks=callbacks,
        name=name,
        tracking=tracking,
        **options,
    )
