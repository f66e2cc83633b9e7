"""Creation of backends by name."""

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
    """Creates backends in this process; workers create their own."""

    @staticmethod
    def training(name: str, setup: TrainingSetup | None = None) -> TrainingBackend:
        """Returns a training backend.

        Args:
            name: The name it is registered under.
            setup: Arguments of its `setup`; None if the caller sets it up.

        Raises:
            ConfigError: If no backend has that name; lists the choices.
        """
        return _made(get_training_backend(name), setup)  # type: ignore[no-any-return]

    @staticmethod
    def generation(name: str, setup: GenerationSetup | None = None) -> GenerationBackend:
        """Returns a generation backend; arguments and errors are those of `training`."""
        return _made(get_generation_backend(name), setup)  # type: ignore[no-any-return]


def _made(backend_class: Any, setup: Any) -> Any:
    backend = backend_class()
    if setup is not None:
        backend.setup(setup)
    return backend
