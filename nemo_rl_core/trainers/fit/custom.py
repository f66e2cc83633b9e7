"""Custom policies and engines, used instead of those that a trainer would start."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import GENERATION_SECTIONS
from nemo_rl_core.config.isolation import IsolationConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import TRAINING_SECTIONS
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_core.models.policy.custom import overrides, takes_state_dict
from nemo_rl_core.models.policy.pretrained import PretrainedPolicy
from nemo_rl_core.store.object_source import ObjectSource, object_source


@dataclass
class CustomParts:
    """Custom objects that a trainer was given instead of settings.

    Attributes:
        policy: Policy that replaces the training backend.
        engine: Engine that replaces the generation backend.
        critic: Critic of a custom policy.
    """

    policy: PolicyInterface | None = None
    engine: GenerationInterface | None = None
    critic: PolicyInterface | None = None

    @property
    def session(self) -> ClusterSession | None:
        """Session of an engine of this project; the trainer shares it."""
        # getattr keeps the engine's source out of the digest of trainings without one.
        session = getattr(self.engine, "session", None)
        return session if isinstance(session, ClusterSession) else None

    @property
    def objects(self) -> dict[str, Any]:
        """The custom parts by name, without an engine of this project, which has settings."""
        engine = None if self.session is not None else self.engine
        parts = {"policy": self.policy, "engine": engine, "critic": self.critic}
        return {name: part for name, part in parts.items() if part is not None}

    @cached_property
    def sources(self) -> dict[str, ObjectSource]:
        """Digests of the classes and attributes of `objects`, before their first training."""
        return {name: object_source(part) for name, part in self.objects.items()}

    @classmethod
    def taken_from(
        cls, first: Any, overrides: dict[str, Any], settings_class: type[FrozenConfig]
    ) -> "CustomParts":
        """Takes the parts out of a trainer's arguments and puts their sections there instead.

        Args:
            first: The trainer's first argument.
            overrides: The trainer's other arguments; an engine is replaced by its section.
            settings_class: Class of the trainer's settings.
        """
        parts = cls()
        if isinstance(first, PolicyInterface) and not isinstance(first, PretrainedPolicy):
            parts.policy = first
            _refuse_unread(first, overrides)
            overrides["training"] = {"backend": _registered(TRAINING_SECTIONS, first)}
        engine, samples = overrides.get("generation"), "generation" in settings_class.model_fields
        if not isinstance(engine, GenerationInterface):
            if parts.policy is not None and samples:
                _refuse_backend(parts.policy, engine)
                name = _registered(GENERATION_SECTIONS, parts.policy)
                overrides["generation"] = {**(engine or {}), "backend": name}
            return parts
        if not samples:
            raise ConfigError(
                "this algorithm does not sample, so it accepts no engine",
                got=f"generation={type(engine).__name__}",
                fix="leave generation out",
            )
        parts.engine = engine
        if parts.policy is not None and takes_state_dict(engine):
            _refuse_without_state_dict(parts.policy, engine)
        if parts.session is None:
            overrides["generation"] = {"backend": _registered(GENERATION_SECTIONS, engine)}
            return parts
        overrides["generation"] = engine.config.model_dump()  # type: ignore[attr-defined]
        if parts.policy is not None:
            raise ConfigError(
                f"{type(engine).__name__} takes weights from a training backend's workers, "
                f"which {type(parts.policy).__name__} does not have",
                expected="a policy with generate, or a custom engine with update_weights",
                fix="leave generation out, and let the policy generate",
            )
        return parts

    def refuse_isolated(self, isolation: IsolationConfig, reward_fn: Any) -> None:
        """Refuses isolated packages of a component that is an object in this process."""
        objects = {
            "training": self.policy,
            "generation": self.engine or self.policy,
            "environment": reward_fn,
        }
        for component, part in objects.items():
            if part is not None and getattr(isolation, component) is not None:
                name = getattr(part, "__name__", type(part).__name__)
                raise ConfigError(
                    f"isolation.{component} has no effect: {name} runs in this process",
                    expected=f"a {component} that the settings describe, in separate workers",
                    fix=f"remove isolation.{component}, or describe it by the settings",
                )

    def refuse_without(self, methods: Mapping[str, str], *, algorithm: str) -> None:
        """Refuses a custom policy without a method that the run will call.

        `methods` maps names of methods to what each computes.
        """
        policy = self.policy
        if policy is None:
            return
        missing = [name for name in methods if not overrides(policy, name)]
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


def _refuse_without_state_dict(policy: PolicyInterface, engine: GenerationInterface) -> None:
    if not callable(getattr(policy, "state_dict", None)):
        name = type(engine).__name__
        raise ConfigError(
            f"{type(policy).__name__} has no state_dict(), which {name}.update_weights takes",
            expected=f"{type(policy).__name__}.state_dict(), or {name}.update_weights(policy)",
            fix="add one of the two",
        )


def _refuse_backend(policy: PolicyInterface, section: Any) -> None:
    backend = section.get("backend") if isinstance(section, Mapping) else None
    if backend is not None:
        raise ConfigError(
            f"the generation backend {backend!r} takes weights from a training backend's workers, "
            f"which {type(policy).__name__} does not have",
            expected="a policy with generate, or a custom engine: generation=engine",
            got=f"generation.backend: {backend}",
            fix="leave the backend out",
        )


def _registered(table: Any, part: Any) -> str:
    """Returns the name of a part in the settings, and so in the record of the run."""
    kind = type(part)
    name = f"{kind.__module__}.{kind.__qualname__}"
    table.add(name, None, kind.__module__)
    return name


def _refuse_unread(policy: PolicyInterface, overrides: Mapping[str, Any]) -> None:
    trained = {*OptimizerConfig.model_fields, "training", "dtype", "max_tokens_per_microbatch"}
    # A training backend trains the critic.
    sections = [
        value
        for name, value in overrides.items()
        if isinstance(value, Mapping) and name != "critic"
    ]
    names = {*overrides, *(name for section in sections for name in section)}
    unread = sorted(trained & names)
    if unread:
        raise ConfigError(
            f"a custom policy trains itself: nothing reads {', '.join(unread)}",
            expected="settings of the loop, of rollouts and of the loss",
            fix=f"pass these values to {type(policy).__name__} itself",
        )
