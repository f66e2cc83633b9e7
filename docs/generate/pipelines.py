"""The pipelines under `workflows/`, and the recipe that each one reads."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekit.core.workflow import PythonFunctionWorkflow

from tasks.recipes.common import Recipe, default_name

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Pipeline:
    """One pipeline that `pyflyte run` starts.

    Attributes:
        name: Its name in commands, which is that of its file: `nemo-rl run NAME`.
        function: The workflow's function.
        file: The file that holds it, below the repository.
        recipe: The class of its argument `config`.
        default: The recipe of `workflows/recipes` that runs where none is config.
        stages: The first line of its docstring.
    """

    name: str
    function: str
    file: str
    recipe: type[Recipe]
    default: str
    stages: str

    @property
    def command(self) -> str:
        """The command that runs it with its default recipe."""
        return f".venv/bin/pyflyte run {self.file} {self.function}"


def pipelines() -> list[Pipeline]:
    """Every pipeline that has a default recipe, by file."""
    pipelines = []
    for path in sorted((REPOSITORY / "workflows").glob("*.py")):
        module = importlib.import_module(f"workflows.{path.stem}")
        default = getattr(module, "DEFAULT", None)
        if isinstance(default, Recipe):
            pipelines.append(_pipeline(f"workflows/{path.name}", vars(module), default))
    return pipelines


def _pipeline(file: str, names: dict[str, Any], default: Recipe) -> Pipeline:
    for value in names.values():
        if not isinstance(value, PythonFunctionWorkflow):
            continue
        config = value.python_interface.inputs_with_defaults.get("config")
        if config is not None and config[1] is default:
            return Pipeline(
                name=Path(file).stem,
                function=value.short_name,
                file=file,
                recipe=type(default),
                default=default_name(default) or "",
                stages=(value.__doc__ or "").strip().partition("\n")[0],
            )
    raise AssertionError(f"{file} has a default recipe and no workflow that takes it")
