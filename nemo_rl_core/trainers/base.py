"""What every trainer does: set up, loop, validate, save, and call back.

An algorithm fills in what its steps work on and what one of them does. There is one loop an
algorithm: a stage of a pipeline calls `run` on the folders of its artifacts, and `fit` makes such
folders from whatever a user has at hand and calls `run` too.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

from pydantic import ValidationError

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.model import ModelConfig, as_model
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings
from nemo_rl_core.data.loader import PromptLoader, load_records
from nemo_rl_core.distributed.session import ClusterSession, connect
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.own import OwnPolicy
from nemo_rl_core.models.policy.pretrained import PretrainedPolicy
from nemo_rl_core.telemetry.timer import Timer
from nemo_rl_core.trainers.callbacks import Callback, Callbacks
from nemo_rl_core.trainers.defaults import with_defaults_of
from nemo_rl_core.trainers.fit_request import FitRequest, FittedTrainer
from nemo_rl_core.trainers.fitting import TrainResult, as_tracking, fit
from nemo_rl_core.trainers.gpu_load import load_of_trainer
from nemo_rl_core.trainers.loop import Checkpointed, RunResult, RunSpec, StepLoop, StepRange
from nemo_rl_core.trainers.overrides import nested_overrides, refuse_unclaimed
from nemo_rl_core.trainers.own import OwnParts
from nemo_rl_core.trainers.peer_calls import TrainerArguments, fit_arguments, in_our_words
from nemo_rl_core.trainers.plain import PlainSettings, plain_settings
from nemo_rl_core.trainers.sections import rows_per_step, steps_of
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
    """One algorithm's loop.

    A subclass says what a step does with a batch (`_train_step`), and usually how a data set
    becomes batches (`_load`; else they are lists of rows). It names the class of its settings,
    which hold one section named after the algorithm, a `LoopConfig`. One that names none has its
    loop in the section `loop`, and a section of its own that is an open mapping.

    Args:
        settings: An instance of `settings_class`, or what makes one: a mapping with the section of
            the algorithm, and `seed`, `cluster`, `training` and so on where they are not the
            defaults. A `HuggingFacePolicy` or `MegatronPolicy` stands for its model and options;
            after `fit` it has what was learnt. Any other `PolicyInterface` is trained itself, in
            this process; `model` then names the model whose tokenizer the data is written with, or
            the policy has an attribute `model_name`.
        session: Where the workers run, or a cluster of your own; by default that of the policy,
            or of the settings' cluster.
        **overrides: Settings by name, beside a policy; as those of `from_pretrained`. `generation`
            may be a `GenerationInterface`, which samples in place of an engine of the trainer's.

    Attributes:
        algorithm: The name of the section, and of the algorithm; by default that of the class,
            small and without `Trainer`.
        settings_class: What `settings` is checked against.
        refuses_own: By `policy` and `engine`, why the algorithm takes none of the user's.
        settings: As checked.
        model: What `fit` trains, where `from_pretrained` was told.
        policy: The model in training, while a run goes on.
        step: The number of the step that goes on, counted from 1.
        timer: Measures the phases of that step.

    Raises:
        ConfigError: For a setting that does not exist (names the nearest one) or does not fit.
    """

    algorithm: ClassVar[str]
    settings_class: ClassVar[type[TrainerSettings]]
    refuses_own: ClassVar[Mapping[str, str]] = {}

    settings: S
    policy: "Policy | OwnPolicy"
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
        arguments = self._in_our_words(settings, overrides)
        settings, overrides, self._fit_arguments = (
            arguments.settings,
            arguments.overrides,
            arguments.fit,
        )
        self._given = settings if isinstance(settings, PretrainedPolicy) else None
        self._own = OwnParts.taken_from(settings, overrides, self.settings_class)
        self._refuse_unfit(self._own)
        session = session or (self._given.cluster if self._given else None)
        session = session or self._own.session
        self._session = (
            ClusterSession(session) if isinstance(session, RayVirtualCluster) else session
        )
        if isinstance(settings, PretrainedPolicy):
            self.model = settings.model_name
            cluster = self._session.cluster if self._session else None
            samples = "generation" in self.settings_class.model_fields
            overrides = settings.options(cluster, of_generate=samples) | overrides
            settings = self._build_config_from_pretrained(self.model, **overrides)
            settings = with_defaults_of(self.model, settings, type(self))
        elif isinstance(settings, PolicyInterface):
            self.model = overrides.pop("model", None) or getattr(settings, "model_name", None)
            settings = self._build_config_from_pretrained(self.model or "", **overrides)
        elif not isinstance(settings, TrainerSettings | Mapping):
            self.model = settings
            settings = self._build_config_from_pretrained(self.model, **overrides)
            settings = with_defaults_of(self.model, settings, type(self))
        refuse_unclaimed(self.settings_class, self.algorithm, dict(settings), overrides)
        self.settings = cast("S", self._checked(settings))
        self._own.refuse_without(self._policy_methods(), algorithm=self.algorithm)

    @classmethod
    def _in_our_words(cls, settings: Any, overrides: dict[str, Any]) -> TrainerArguments:
        field = cls.settings_class.model_fields.get(cls.algorithm)
        return in_our_words(
            settings,
            overrides,
            trainer=cls.__name__,
            section=field.annotation if field else None,
            name=cls.algorithm,
        )

    @classmethod
    def _refuse_unfit(cls, own: OwnParts) -> None:
        """Refuses a policy or an engine of the user's that the algorithm cannot use."""
        own.refuse_unfit(cls.refuses_own, algorithm=cls.algorithm)

    def _policy_methods(self) -> dict[str, str]:
        """Methods besides `train` that these settings call on a custom policy, with their use."""
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
        """A trainer of a model, with every setting at its default but those given.

        The defaults follow the model: a pretrained one gets the learning rate, completion length
        and type that such models are trained with, and the GPUs of this machine. What was chosen is
        logged, and part of the recorded config.

        Args:
            model: A hub name, a folder in the transformers layout, the config of a model, also as
                the mapping that stands in a recipe, or a policy, as the constructor takes it.
            **overrides: Settings by name, wherever they stand: `learning_rate` of the algorithm's
                section, `max_new_tokens` of `generation`, `seed`, or a whole section as a mapping.

        Raises:
            ConfigError: For a name that is no setting, or one of several sections.
        """
        if isinstance(model, PolicyInterface):
            return cls(model, **overrides)
        named: str | Path | ModelConfig = as_model(model)
        own = OwnParts.taken_from(named, overrides, cls.settings_class)
        cls._refuse_unfit(own)
        config = cls._build_config_from_pretrained(named, **overrides)
        refuse_unclaimed(cls.settings_class, cls.algorithm, config, overrides)
        trainer = cls(with_defaults_of(named, config, cls))
        trainer.model, trainer._own = named, own
        trainer._session = own.session or trainer._session
        return trainer

    @classmethod
    def _build_config_from_pretrained(
        cls, model: str | Path | ModelConfig, **kwargs: Any
    ) -> dict[str, Any]:
        """The overrides as nested mappings; a subclass adds what only it knows.

        Args:
            model: What is trained; not read here.
            **kwargs: The overrides. One that stands nowhere in what is returned is refused.
        """
        return nested_overrides(cls.settings_class, cls.algorithm, kwargs)

    @property
    def config(self) -> C:
        """The section of the settings that says how the loop runs: the algorithm's own."""
        is_plain = isinstance(self.settings, PlainSettings)
        section: C = getattr(self.settings, "loop" if is_plain else self.algorithm)
        return section

    @property
    def session(self) -> ClusterSession:
        """Where the workers run; started when first asked for."""
        if self._session is None:
            self._session = connect(self.settings.cluster)
        return self._session

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
        """Trains on any data, in the store, with lineage.

        Args:
            dataset: A hub name, a file or folder, a list of dicts, a `datasets.Dataset`: see
                `DataModule.of`. None takes what the trainer was made with, as TRL's are.
            reward_fn: A function of `completion` and what it names of the row (`prompt`, `answer`,
                `metadata`, any column), one of lists of these, a list of such functions, or an
                environment; for algorithms that score completions. None: the environment of the
                settings.
            reward_weights: Of the functions of a list; None weighs each by 1.
            validation: Rows that are never trained on, in the same forms; None holds some out.
            reference: The reference or teacher; None takes the model itself.
            callbacks: Called in order at each hook.
            name: Of the run: an interrupted one of the same name and inputs is continued.
            tracking: Trackers, as a recipe names them: `{"trackers": [{"kind": "tensorboard",
                "folder": "logs"}]}`. The run is recorded in the store without any.
            **row_format: How the data's columns are read, such as `columns`, `answer_pattern` or
                `system_prompt`: see `DataModule.of`.

        Raises:
            NemoRLError: For what cannot be used, before any worker starts.
        """
        given = {
            "dataset": dataset,
            "reward_fn": reward_fn,
            "reward_weights": reward_weights,
            "validation": validation,
            "callbacks": callbacks,
        }
        asked = fit_arguments(self._fit_arguments, given, row_format)
        RowFormat.of(row_format, beside=_FIT_OPTIONS)

        def run(artifacts: Mapping[str, Path], work: Path, scorer: "Scorer | None") -> RunResult:
            spec = self.run_spec(artifacts, work, scorer=scorer)
            return self.run(spec, callbacks=asked["callbacks"])

        request = FitRequest(
            self._model_to_train(reference),
            asked["dataset"],
            validation=asked["validation"],
            reward_fn=asked["reward_fn"],
            reference=reference,
            name=name,
            reward_weights=asked["reward_weights"],
            row_format=row_format,
            tracking=as_tracking(tracking),
            parts=self._own.objects,
            stoppers=[each for each in asked["callbacks"] if each.stops],
        )
        result = fit(FittedTrainer(self.algorithm, type(self), self.settings, run), request)
        if self._given is not None:
            self._given.go_on_from(result.checkpoint)
        return result

    def _model_to_train(self, reference: Any) -> str | Path | ModelConfig:
        """The model, which stands beside no reference if the policy is the user's own."""
        if self.model is None:
            raise ConfigError(
                f"this {type(self).__name__} has no model to train",
                fix=f"make it with {type(self).__name__}.from_pretrained(model, ...)"
                if self._own.policy is None
                else f"name the model whose tokenizer it has, {type(self).__name__}(policy, "
                "model=FOLDER)",
            )
        if self._own.policy is not None and reference is not None:
            raise ConfigError(
                "a policy of your own compares with a reference of its own",
                got=f"reference={reference!r}",
                fix=f"load it in {type(self._own.policy).__name__}, and leave reference out",
            )
        return self.model

    def train(self, dataset: Any = None, **options: Any) -> TrainResult:
        """As `fit`, by the name that it has beside a policy: `DPOTrainer(policy).train(rows)`."""
        return self.fit(dataset, **options)

    def run_spec(
        self, artifacts: Mapping[str, Path], work: Path, *, scorer: "Scorer | None"
    ) -> RunSpec:
        """The spec of a first iteration on artifacts by role, as `fit` has them."""
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
        """Trains, from the last save where an earlier attempt left one.

        Args:
            spec: What to read and where to write.
            callbacks: Called in order at each hook.
        """
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
        called = Callbacks(self, callbacks)
        self._loop, self._may_stop, self.step = loop, called.may_stop, 0
        with ExitStack() as resources:
            self._set_up(spec, resources)
            every = self.config.validate_every_num_steps
            validation = ValidationRunner(self._validate, every_num_steps=every, last=steps.last)
            called.call("on_fit_begin")
            # A save that nobody reads but this loop has no whole model in it.
            on_save = partial(called.call, "on_save") if called.handles("on_save") else None
            steps_left = loop.steps(self._trained(), on_save=on_save, before_save=self._before_save)
            with closing(steps_left) as left:
                for step in left:
                    self._run_step(step, steps, loop, called, validation)
            called.call("on_fit_end")
            # A trainer of a user's may have no policy, and a policy of theirs no choices.
            choices = getattr(getattr(self, "policy", None), "choices", {})
            return loop.finish(peak_memory_gib=self._peak_memory_gib(), choices=choices)

    def _run_step(
        self,
        step: int,
        steps: StepRange,
        loop: StepLoop,
        called: Callbacks,
        validation: ValidationRunner,
    ) -> None:
        self.step, self.timer = step, Timer()
        epoch = self._batches.epoch(step - 1)
        if step == steps.first or epoch != self._batches.epoch(step - 2):
            called.call("on_epoch_begin", epoch)
        called.call("on_step_begin", step)
        metrics = self._train_step(self._batches.batch(step - 1))
        metrics |= validation.after_step(step, called)
        metrics |= self._replacements()
        loop.report(step, metrics, self.timer.take())
        called.call("on_step_end", step, metrics)
        if step == loop.last or epoch != self._batches.epoch(step):
            called.call("on_epoch_end", epoch, metrics)

    @property
    def history(self) -> Sequence[Mapping[str, float]]:
        """Metrics of each step that has ended, those before a resume included."""
        return self._loop.history

    def stop(self, reason: str) -> None:
        """Ends the run after this step; for callbacks.

        The step is saved, its model is the result, and the run's state is `stopped`. It is
        validated only if its number asks for that.

        Raises:
            ConfigError: If no step is under way, or no callback says that it may stop the run.
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
        """The rows of `spec.train`, ready to be dealt out in batches of `global_batch_size`."""
        size = rows_per_step(self.config).global_batch_size
        return PromptLoader(load_records(spec.train), batch_size=size, seed=self.settings.seed)

    @abstractmethod
    def _train_step(self, batch: list[Any]) -> dict[str, float]:
        """One step on a batch of what `_load` deals; returns metrics that reruns repeat."""

    def _validate(self) -> dict[str, float]:
        """Figures on held-out rows; none unless an algorithm has such."""
        return {}

    def _replacements(self) -> dict[str, float]:
        """How many workers were lost and replaced in this step, by kind; none where all must last.

        Figures that a rerun without the loss does not repeat.
        """
        return {}

    def _stage(self, spec: RunSpec) -> str:
        """What reports call the run."""
        return self.algorithm

    def _steps(self, spec: RunSpec) -> StepRange:
        """Which steps the run has: `num_steps`, or an iteration's share of them."""
        return steps_of(self.config, spec.iteration)

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        """Makes ready whatever steps need; `resources` ends with the run."""
        self._batches = self._load(spec)  # first: rows of a wrong kind must start no worker
        self.policy = self._make_policy(spec)
        if spec.resume is not None:
            self.policy.load_checkpoint(spec.resume)

    def _make_policy(self, spec: RunSpec) -> "Policy | OwnPolicy":
        if self._own.policy is None:
            return Policy(self.session, self._training_setup(spec))
        return OwnPolicy(self._own.policy)

    def _training_setup(self, spec: RunSpec) -> TrainingSetup:
        return TrainingSetup(
            model_folder=spec.start,
            optimizer=self.config,
            max_tokens_per_microbatch=self.config.max_tokens_per_microbatch,
            training=self.settings.training,
            dtype=self.settings.dtype,
            seed=self.settings.seed,
            load=load_of_trainer(self.algorithm, self.config, self.settings, spec),
        )

    def _trained(self) -> Checkpointed:
        """What a checkpoint holds."""
        return self.policy

    def _before_save(self) -> None:
        """Writes what a step leaves besides its checkpoint, metrics and timings."""

    def _peak_memory_gib(self) -> float:
        return self.policy.peak_memory_gib()
