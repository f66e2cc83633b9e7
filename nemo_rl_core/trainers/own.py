"""Policies and engines of the user's, in place of those that a trainer would start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import GENERATION_SECTIONS
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import TRAINING_SECTIONS
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_core.models.policy.own import has_own
from nemo_rl_core.models.policy.pretrained import PretrainedPolicy


@dataclass
class OwnParts:
    """What a trainer was given instead of settings.

    Attributes:
        policy: Trains in place of a training backend.
        engine: Completes prompts in place of a generation backend.
    """

    policy: PolicyInterface | None = None
    engine: GenerationInterface | None = None

    @property
    def session(self) -> ClusterSession | None:
        """Where an engine of this project runs; its trainer shares the session."""
        # By its attribute, so that a training without an engine does not reach its source.
        session = getattr(self.engine, "session", None)
        return session if isinstance(session, ClusterSession) else None

    @property
    def objects(self) -> dict[str, Any]:
        """The parts that there are, by name; not an engine of this project, which has settings."""
        engine = None if self.session is not None else self.engine
        parts = {"policy": self.policy, "engine": engine}
        return {name: part for name, part in parts.items() if part is not None}

    @classmethod
    def taken_from(
        cls, given: Any, overrides: dict[str, Any], settings_class: type[FrozenConfig]
    ) -> "OwnParts":
        """The parts among a trainer's arguments, where the sections that they stand for remain.

        Args:
            given: The trainer's first argument.
            overrides: The trainer's others; an engine in it is replaced by its section.
            settings_class: Of the trainer.

        Raises:
            ConfigError: If the trainer samples nothing, or an override says how the policy is
                trained, which only the policy knows.
        """
        parts = cls._read(given, overrides, settings_class)
        parts._refuse_a_built_in_engine()
        return parts

    def refuse_unfit(self, reasons: Mapping[str, str], *, algorithm: str) -> None:
        """Refuses parts that an algorithm cannot use.

        Args:
            reasons: Why the algorithm takes no custom part, by `policy` and `engine`.
            algorithm: Name of the algorithm.

        Raises:
            ConfigError: If there is such a part.
        """
        for name, part in (("policy", self.policy), ("engine", self.engine)):
            if part is not None and name in reasons:
                raise ConfigError(
                    f"{algorithm} takes no {name} of your own: {reasons[name]}",
                    got=type(part).__name__,
                    fix="name a model, or choose another algorithm, such as grpo, sft or dpo",
                )

    def refuse_without(self, methods: Mapping[str, str], *, algorithm: str) -> None:
        """Refuses a custom policy without a method that the run will call.

        Args:
            methods: Names of the methods, with what each computes.
            algorithm: Name of the algorithm.

        Raises:
            ConfigError: Names all that are missing.
        """
        policy = self.policy
        if policy is None:
            return
        missing = [name for name in methods if not has_own(policy, name)]
        if self.engine is not None and "generate" in missing:
            missing.remove("generate")
        if missing:
            name = type(policy).__name__
            raise ConfigError(
                f"{algorithm} with these settings calls methods that {name} does not have",
                expected="; ".join(f"{name}.{each}(batch): {methods[each]}" for each in missing),
                fix="add them as PolicyInterface describes them, change the settings that need "
                "them, or name a model",
            )

    def _refuse_a_built_in_engine(self) -> None:
        if self.policy is not None and self.session is not None:
            raise ConfigError(
                f"{type(self.engine).__name__} takes weights from a training backend's workers, "
                f"which {type(self.policy).__name__} does not have",
                expected="a policy with generate, or an engine of your own with update_weights",
                fix="leave generation out, and let the policy generate",
            )

    @classmethod
    def _read(
        cls, given: Any, overrides: dict[str, Any], settings_class: type[FrozenConfig]
    ) -> "OwnParts":
        parts = cls()
        if isinstance(given, PolicyInterface) and not isinstance(given, PretrainedPolicy):
            parts.policy = given
            _refuse_unread(given, overrides)
            overrides["training"] = {"backend": _registered(TRAINING_SECTIONS, given)}
        engine = overrides.get("generation")
        if not isinstance(engine, GenerationInterface):
            if parts.policy is not None and "generation" in settings_class.model_fields:
                name = _registered(GENERATION_SECTIONS, parts.policy)
                overrides["generation"] = {**(engine or {}), "backend": name}
            return parts
        if "generation" not in settings_class.model_fields:
            raise ConfigError(
                "this algorithm samples nothing, so it takes no engine",
                got=f"generation={type(engine).__name__}",
                fix="leave generation out",
            )
        parts.engine = engine
        overrides["generation"] = (
            engine.config.model_dump()  # type: ignore[attr-defined]
            if parts.session is not None
            else {"backend": _registered(GENERATION_SECTIONS, engine)}
        )
        return parts


def _registered(table: Any, part: Any) -> str:
    """The name under which a part stands in the settings, and so in the record of the run."""
    kind = type(part)
    name = f"{kind.__module__}.{kind.__qualname__}"
    table.add(name, None, kind.__module__)
    return name


def _refuse_unread(policy: PolicyInterface, overrides: Mapping[str, Any]) -> None:
    trained = {*OptimizerConfig.model_fields, "training", "dtype", "max_tokens_per_microbatch"}
    sections = [value for value in overrides.values() if isinstance(value, Mapping)]
    names = {*overrides, *(name for section in sections for name in section)}
    unread = sorted(trained & names)
    if unread:
        raise ConfigError(
            f"a policy of your own trains itself: nothing reads {', '.join(unread)}",
            expected="settings of the loop, of rollouts and of the loss",
            fix=f"give {type(policy).__name__} these values itself",
        )
