"""Settings of the packages that the workers of one component have instead of the project's."""

from typing import Literal, Self

from pydantic import Field, model_validator

from nemo_rl_core.config.base import FrozenConfig

Component = Literal["environment", "generation", "training"]


class IsolatedPackages(FrozenConfig):
    """Packages that workers import before those of the project.

    Attributes:
        requirements: Requirements file that pins every package with `==`. The packages are
            installed once into the store, without others that they depend on.
        folder: Prepared folder: a virtual environment, or a folder of `pip install --target`.
        packages: Pinned packages of the file, or packages in the folder, which are part of the
            cache key. A run fills them in, and leaves the path of the file out.
    """

    requirements: str | None = None
    folder: str | None = None
    packages: list[str] = Field(default=[])

    @model_validator(mode="after")
    def _names_one_source(self) -> Self:
        sources = [each for each in (self.requirements, self.folder) if each is not None]
        if len(sources) > 1 or not (sources or self.packages):
            raise ValueError("name either a requirements file or a prepared folder")
        return self


class IsolationConfig(FrozenConfig):
    """Packages of each component whose workers do not use the project's versions.

    Attributes:
        environment: Packages of the actors of `environment_workers`.
        generation: Packages of engines.
        training: Packages of workers that train, or compute logprobs of a reference or teacher.
    """

    environment: IsolatedPackages | None = None
    generation: IsolatedPackages | None = None
    training: IsolatedPackages | None = None

    def only(self, *components: Component) -> Self:
        """Returns the config without the packages of other components."""
        return self.replace(
            **{name: None for name in type(self).model_fields if name not in components}
        )
