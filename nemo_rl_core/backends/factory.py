"""Backends by name, ready to be set up."""

from typing import Any

from nemo_rl_core.backends.generation.base import (
    GenerationBackend,
    GenerationSetup,
    get_generation_backend,
)
from nemo_rl_core.backends.training.base import (
    TrainingBackend,
    TrainingSetup,
    get_training_backend,
)


class BackendFactory:
    """Makes a backend in this process; workers make theirs themselves."""

    @staticmethod
    def training(name: str, setup: TrainingSetup | None = None) -> TrainingBackend:
        """A training backend.

        Args:
            name: As it is registered.
            setup: With which it is set up; None leaves that to the caller.

        Raises:
            ConfigError: If there is none of that name; lists the choices.
        """
        return _made(get_training_backend(name), setup)  # type: ignore[no-any-return]

    @staticmethod
    def generation(name: str, setup: GenerationSetup | None = None) -> GenerationBackend:
        """A generation backend; arguments and errors as those of `training`."""
        return _made(get_generation_backend(name), setup)  # type: ignore[no-any-return]


def _made(backend_class: Any, setup: Any) -> Any:
    backend = backend_class()
    if setup is not None:
        backend.setup(setup)
    return backend
