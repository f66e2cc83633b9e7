"""The base of all trainers: setup, the loop, validation, saving and callbacks.

A subclass implements loading of batches and one training step. Every algorithm has one loop: a
stage of a pipeline calls `run` on the folders of its artifacts; `fit` creates such folders from
the user's model and data, then calls `run`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

from pydantic import ValidationError

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.functions import FIELDS
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.model import ModelConfig, as_model
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings
from nemo_rl_core.data.loader import PromptLoader, load_records
from nemo_rl_core.distributed.isolation import with_packages
from nemo_rl_core.distributed.session import ClusterSession, connect
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.models.policy.pretrained import PretrainedPolicy
from nemo_rl_core.telemetry.usage import Timer
from nemo_rl_core.trainers.callbacks import Callback, Callbacks
from nemo_rl_core.trainers.custom_functions import CustomFunctions, with_functions
from nemo_rl_core.trainers.fit.custom import CustomParts
from nemo_rl_core.trainers.fit.defaults import with_defaults_of
from nemo_rl_core.trainers.fit.fitting import TrainResult, as_tracking, fit
from nemo_rl_core.trainers.fit.overrides import nested_overrides, refuse_unclaimed
from nemo_rl_core.trainers.fit.peer_calls import fit_arguments, read_arguments
from nemo_rl_core.trainers.fit.request import FitRequest, TrainerForFit
from nemo_rl_core.trainers.gpu_load import load_of_trainer
from nemo_rl_core.trainers.loop import Checkpointed, RunResult, RunSpec, StepLoop, StepRange
from nemo_rl_core.trainers.sections import (
    PlainSettings,
    plain_settings,
    rows_per_step,
    steps_of,
)
from nemo_rl_core.trainers.validation import ValidationRunner

if TYPE_CHECKING:
    from nemo_rl_core.environments.interfaces import Scorer

S = TypeVar("S", bound=TrainerSettings)
C = TypeVar("C", bound=LoopConfig)

_FIT_OPTIONS = (
    *("reward_fn", "reward_weights", "validation", "reference", "callbacks"),
    *("name", "tracking"),
)


class BaseTrainer(ABC, Generic[S, C]):
    """The training loop of one algorithm.

    A subclass implements `_train_step`, and usually `_load`, which turns a data set into batches
    (lists of rows by default). It names the class of its settings, which have a section named
    after the algorithm, a `LoopConfig`. Without such a class, the loop is configured in the
    section `loop`, and the section named after the algorithm accepts any keys.

    Args:
        settings: An instance of `settings_class`, or a mapping with its fields: the section of
            the algorithm, plus `seed`, `cluster`, `training` and so on where they differ from the
            defaults. A `HuggingFacePolicy` or `MegatronPolicy` provides its model and options;
            after `fit` it has the trained weights. Any other `PolicyInterface` is trained itself,
            in this process; `model`, or the policy's attribute `model_name`, then names the model
            whose tokenizer encodes the data.
        session: Session or cluster that the workers run on; by default that of the policy, or one
            of the settings' cluster.
        **overrides: Settings by name, the same as in `from_pretrained`. `generation` may be a
            `GenerationInterface`, which samples instead of an engine started by the trainer;
            `loss_fn` and `advantage_fn` replace the loss and the advantages.

    Attributes:
        algorithm: Name of the algorithm and of its section; by default the name of the class in
            lower case without `Trainer`.
        settings_class: Class that `settings` is validated against.
        settings: The validated settings.
        model: Model that `fit` trains, if one was named.
        custom_functions: The custom loss and advantage.
        policy: The model in training, during a run.
        step: 1-based number of the current step.
        timer: Timer of the phases of the current step.

    Raises:
        ConfigError: For a setting that does not exist (names the nearest one) or is invalid.
    """

    algorithm: ClassVar[str]
    settings_class: ClassVar[type[TrainerSettings]]

    settings: S
    policy: "Policy | CustomPolicyAdapter"
    step: int
    timer: Timer
    model: str | Path | ModelConfig | None = None
    _batches: PromptLoader[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_train_step" not in vars(cls):
            return  # a base of trainers, or a variant of one
        if not hasattr(cls, "algorithm"):
            cls.algorithm = cls.__name__.removesuffix("Trainer").lower()
        if not hasattr(cls, "settings_class"):
            cls.settings_class = plain_settings(cls.algorithm)

    def __init__(
        self,
        settings: TrainerSettings
        | Mapping[str, Any]
        | PolicyInterface
        | ModelConfig
        | str
        | Path
        | None = None,
        session: ClusterSession | RayVirtualCluster | None = None,
        **overrides: Any,
    ) -> None:
        settings, overrides, self._fit_arguments = read_arguments(
            settings,
            overrides,
            trainer=type(self).__name__,
            section=self._section_class(),
            name=self.algorithm,
        )
        self._pretrained = settings if isinstance(settings, PretrainedPolicy) else None
        functions = {name: fn for name in FIELDS if (fn := overrides.pop(name, None)) is not None}
        self._custom = CustomParts.taken_from(settings, overrides, self.settings_class)
        session = session or (self._pretrained.cluster if self._pretrained else None)
        session = session or self._custom.session
        if isinstance(session, RayVirtualCluster):
            session = ClusterSession(session)
        if session is not None:
            self.session = session
        if isinstance(settings, PretrainedPolicy):
            self.model = settings.model
            cluster = session.cluster if session else None
            samples = "generation" in self.settings_class.model_fields
            overrides = settings.options(cluster, of_generate=samples) | overrides
        elif isinstance(settings, PolicyInterface):
            self.model = overrides.pop("model", None) or getattr(settings, "model_name", None)
        elif not isinstance(settings, TrainerSettings | Mapping):
            self.model = settings
        if not isinstance(settings, TrainerSettings | Mapping):
            settings = self._build_config_from_pretrained(self.model or "", **overrides)
        refuse_unclaimed(self.settings_class, self.algorithm, dict(settings), overrides)
        settings = with_functions(
            settings, functions, self._section_class(), algorithm=self.algorithm
        )
        if self.model is not None and self._custom.policy is None:
            settings = with_defaults_of(self.model, dict(settings), type(self))
        checked = self._checked(settings)
        packages = with_packages(checked.isolation)
        self.settings = cast("S", checked.model_copy(update={"isolation": packages}))
        self.custom_functions = CustomFunctions.of(self.algorithm, self.config, functions)
        self._custom.refuse_without(self._policy_methods(), algorithm=self.algorithm)

    @classmethod
    def _section_class(cls) -> Any:
        field = cls.settings_class.model_fields.get(cls.algorithm)
        return field.annotation if field else None

    def _policy_methods(self) -> dict[str, str]:
        """Returns the methods besides `train` that these settings call on a custom policy."""
        return {}

    @classmethod
    def _checked(cls, settings: TrainerSettings | Mapping[str, Any]) -> TrainerSettings:
        if isinstance(settings, TrainerSettings):
            return settings
        values = dict(settings)
        try:
            return cls.settings_class.model_validate(values)
        except ValidationError as error:
            raise describe(error, values) from error

    @classmethod
    def from_pretrained(
        cls, model: str | Path | ModelConfig | PolicyInterface, **overrides: Any
    ) -> Self:
        """Creates a trainer of a model with default settings, except the given overrides.

        The defaults depend on the model: a pretrained model gets a suitable learning rate,
        completion length and dtype, and the GPUs of this machine. The choices are logged and
        recorded in the config. A subclass whose constructor takes only settings gets complete ones.

        Args:
            model: A hub name, a folder in the transformers layout, the config of a model (also as
                a mapping, like in a recipe), or a policy, the same as in the constructor.
            **overrides: Settings by name from any section: `learning_rate` of the algorithm's
                section, `max_new_tokens` of `generation`, `seed`, or a full section as a mapping.

        Raises:
            ConfigError: For a name that is not a setting, or that several sections have.
        """
        named = as_model(model)
        parameters = signature(cls).parameters.values()
        takes_overrides = any(each.kind is each.VAR_KEYWORD for each in parameters)
        if takes_overrides or isinstance(named, PolicyInterface):
            return cls(named, **overrides)
        config = cls._build_config_from_pretrained(named, **overrides)
        refuse_unclaimed(cls.settings_class, cls.algorithm, config, overrides)
        trainer = cls(with_defaults_of(named, config, cls))
        trainer.model = named
        return trainer

    @classmethod
    def _build_config_from_pretrained(
        cls, model: str | Path | ModelConfig, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the overrides as nested mappings; a subclass may handle more names.

        The caller refuses any name that is not in the result.
        """
        return nested_overrides(cls.settings_class, cls.algorithm, kwargs)

    @cached_property
    def config(self) -> C:
        """The algorithm's section of the settings, which configures the loop."""
        is_plain = isinstance(self.settings, PlainSettings)
        section: C = getattr(self.settings, "loop" if is_plain else self.algorithm)
        return section

    @cached_property
    def session(self) -> ClusterSession:
        """The session that the workers run in; started on first access."""
        return connect(self.settings.cluster)

    def fit(
        self,
        dataset: Any = None,
        *,
        reward_fn: Any = None,
        reward_weights: Sequence[float] | None = None,
        validation: Any = None,
        reference: str | Path | ModelConfig | None = None,
        callbacks: Sequence[Callback] = (),
        name: str | None = None,
        tracking: TrackingConfig | Mapping[str, Any] | None = None,
        **row_format: Any,
    ) -> TrainResult:
        """Trains on any data and records the result in the store, with lineage.

        Args:
            dataset: A hub name, a file or folder, a list of dicts, a `datasets.Dataset`: see
                `DataModule.of`. None uses the data that the constructor was given, as in TRL.
            reward_fn: A function of `completion` and of columns of the row by name (`prompt`,
                `answer`, `metadata`, any other), a function of lists of these, a list of such
                functions, or an environment; for algorithms that score completions. None uses the
                environment of the settings.
            reward_weights: Weights of a list of functions; None weighs each by 1.
            validation: Rows that are never trained on, in the same forms; None splits some off.
            reference: The reference or teacher model; None uses the model itself.
            callbacks: Called in order at each hook.
            name: Name of the run; an interrupted run of the same name and inputs is continued.
            tracking: Trackers, the same as in a recipe: `{"trackers": [{"kind": "tensorboard",
                "folder": "logs"}]}`. The store records the run with or without them.
            **row_format: Options for reading the data's columns, such as `columns`,
                `answer_pattern` or `system_prompt`: see `DataModule.of`.

        Raises:
            NemoRLError: For unusable inputs, before any worker starts.
        """
        arguments = {
            "dataset": dataset,
            "reward_fn": reward_fn,
            "reward_weights": reward_weights,
            "validation": validation,
            "callbacks": callbacks,
        }
        inputs = fit_arguments(self._fit_arguments, arguments, row_format)
        self._custom.refuse_isolated(self.settings.isolation, inputs["reward_fn"])
        RowFormat.of(row_format, other_names=_FIT_OPTIONS)

        def run(artifacts: Mapping[str, Path], work: Path, scorer: "Scorer | None") -> RunResult:
            spec = self.run_spec(artifacts, work, scorer=scorer)
            return self.run(spec, callbacks=inputs["callbacks"])

        request = FitRequest(
            self._model_to_train(reference),
            inputs["dataset"],
            validation=inputs["validation"],
            reward_fn=inputs["reward_fn"],
            reference=reference,
            name=name,
            reward_weights=inputs["reward_weights"],
            row_format=row_format,
            tracking=as_tracking(tracking),
            parts={**self._custom.objects, **self.custom_functions.objects},
            part_sources=self._custom.sources,
            stoppers=[callback for callback in inputs["callbacks"] if callback.stops],
        )
        result = fit(TrainerForFit(self.algorithm, type(self), self.settings, run), request)
        if self._pretrained is not None:
            self._pretrained.resume_from(result.checkpoint)
        return result

    def _model_to_train(self, reference: Any) -> str | Path | ModelConfig:
        if self.model is None:
            raise ConfigError(
                f"this {type(self).__name__} has no model to train",
                fix=f"make it with {type(self).__name__}.from_pretrained(model, ...)"
                if self._custom.policy is None
                else f"name the model whose tokenizer it has, {type(self).__name__}(policy, "
                "model=FOLDER)",
            )
        if self._custom.policy is not None and reference is not None:
            raise ConfigError(
                "a custom policy cannot be combined with reference=...",
                got=f"reference={reference!r}",
                fix=f"load it in {type(self._custom.policy).__name__}, and leave reference out",
            )
        return self.model

    def train(self, dataset: Any = None, **options: Any) -> TrainResult:
        """Alias of `fit`, for calls such as `DPOTrainer(policy).train(rows)`."""
        return self.fit(dataset, **options)

    def run_spec(
        self, artifacts: Mapping[str, Path], work: Path, *, scorer: "Scorer | None"
    ) -> RunSpec:
        """Returns the spec of a first iteration on artifacts by role."""
        base = artifacts["base"] / "model"
        return RunSpec(
            train=artifacts["train"],
            start=base,
            work=work,
            validation=artifacts["validation"],
            reference=artifacts["reference"] / "model" if "reference" in artifacts else base,
            scorer=scorer,
        )

    def run(self, spec: RunSpec, *, callbacks: Sequence[Callback] = ()) -> RunResult:
        """Trains, resuming from the last save of an earlier attempt if there is one."""
        steps = self._steps(spec)
        loop = StepLoop(
            spec.work,
            stage=self._stage(spec),
            steps=steps,
            save_every_num_steps=self.config.save_every_num_steps,
            keep_latest=self.config.keep_latest,
            keep_best=self.config.keep_best,
        )
        if loop.is_finished:
            return loop.finish()
        hooks = Callbacks(self, callbacks)
        self._loop, self._may_stop, self.step = loop, hooks.may_stop, 0
        with ExitStack() as resources:
            self._set_up(spec, resources)
            interval = self.config.validate_every_num_steps
            validation = ValidationRunner(self._validate, every_num_steps=interval, last=steps.last)
            hooks.call("on_fit_begin")
            # Saves that only this loop reads have no full model.
            on_save = partial(hooks.call, "on_save") if hooks.handles("on_save") else None
            steps_left = loop.steps(self._trained(), on_save=on_save, before_save=self._before_save)
            with closing(steps_left) as left:
                for step in left:
                    self._run_step(step, steps, loop, hooks, validation)
            hooks.call("on_fit_end")
            return loop.finish(peak_memory_gib=self._peak_memory_gib(), choices=self._choices())

    def _choices(self) -> dict[str, str]:
        """Returns the values chosen for settings, by their paths in a recipe."""
        # A custom trainer may have no policy, and a custom policy no choices.
        return dict(getattr(getattr(self, "policy", None), "choices", {}))

    def _run_step(
        self,
        step: int,
        steps: StepRange,
        loop: StepLoop,
        hooks: Callbacks,
        validation: ValidationRunner,
    ) -> None:
        self.step, self.timer = step, Timer()
        epoch = self._batches.epoch(step - 1)
        if step == steps.first or epoch != self._batches.epoch(step - 2):
            hooks.call("on_epoch_begin", epoch)
        hooks.call("on_step_begin", step)
        metrics = self._train_step(self._batches.batch(step - 1))
        loss = self.custom_functions.loss
        if loss is not None and step > getattr(self.config, "num_critic_warmup_steps", 0):
            loss.is_first_step = False
        metrics |= validation.after_step(step, hooks)
        metrics |= self._restart_metrics()
        loop.report(step, metrics, self.timer.take())
        hooks.call("on_step_end", step, metrics)
        if step == loop.last or epoch != self._batches.epoch(step):
            hooks.call("on_epoch_end", epoch, metrics)

    @property
    def history(self) -> Sequence[Mapping[str, float]]:
        """Metrics of all finished steps, including those before a resume."""
        return self._loop.history

    def stop(self, reason: str) -> None:
        """Ends the run after this step; for callbacks.

        The step is saved, its model is the result, and the run's state is `stopped`. It is
        validated only if validation is due after this step anyway.

        Raises:
            ConfigError: If no step is in progress, or no callback declares `stops = True`.
        """
        if self.step < 1:
            raise ConfigError(
                "trainer.stop was called before the first step",
                expected="a call in a hook of a step, such as on_step_end",
                fix="raise an exception to end the run without a result",
            )
        if not self._may_stop:
            raise ConfigError(
                "trainer.stop was called, but no callback of this run may stop it",
                expected="a callback whose class has stops = True",
                fix="write stops = True in the class of the callback, so that the key of a run "
                "with a name depends on it",
            )
        self._loop.stop(self.step, reason)

    def _load(self, spec: RunSpec) -> PromptLoader[Any]:
        """Loads the rows of `spec.train` in batches of `global_batch_size`."""
        size = rows_per_step(self.config).global_batch_size
        return PromptLoader(load_records(spec.train), batch_size=size, seed=self.settings.seed)

    @abstractmethod
    def _train_step(self, batch: list[Any]) -> dict[str, float]:
        """Trains on one batch of `_load`; returns metrics that are equal in reruns."""

    def _validate(self) -> dict[str, float]:
        """Computes metrics on held-out rows; none by default."""
        return {}

    def _restart_metrics(self) -> dict[str, float]:
        """Counts the workers that were replaced in this step, by kind; empty by default.

        A rerun without the failures has different counts.
        """
        return {}

    def _stage(self, spec: RunSpec) -> str:
        """Returns the name of the run in reports."""
        return self.algorithm

    def _steps(self, spec: RunSpec) -> StepRange:
        """Returns the steps of the run: `num_steps`, or an iteration's part of them."""
        return steps_of(self.config, spec.iteration)

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        """Prepares everything that steps need; `resources` is closed after the run."""
        self._batches = self._load(spec)  # first, so that invalid rows fail before workers start
        self.policy = self._make_policy(spec)
        if spec.resume is not None:
            self.policy.load_checkpoint(spec.resume)

    def _make_policy(self, spec: RunSpec) -> "Policy | CustomPolicyAdapter":
        if self._custom.policy is None:
            return Policy(self.session, self._training_setup(spec))
        return CustomPolicyAdapter(self._custom.policy)

    def _training_setup(self, spec: RunSpec) -> TrainingSetup:
        return TrainingSetup(
            model_folder=spec.start,
            optimizer=self.config,
            max_tokens_per_microbatch=self.config.max_tokens_per_microbatch,
            training=self.settings.training,
            dtype=self.settings.dtype,
            seed=self.settings.seed,
            isolation=self.settings.isolation.training,
            load=load_of_trainer(self.algorithm, self.config, self.settings, spec),
        )

    def _trained(self) -> Checkpointed:
        """Returns the state to save in checkpoints."""
        return self.policy

    def _before_save(self) -> None:
        """Writes other files of a step, besides its checkpoint, metrics and timings."""

    def _peak_memory_gib(self) -> float:
        return self.policy.peak_memory_gib()
