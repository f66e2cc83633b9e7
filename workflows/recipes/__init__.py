"""Recipes: only what differs from the defaults."""

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def load_default(name: str, config: type[ConfigT]) -> ConfigT:
    """The recipe of that name beside this file."""
    return config.model_validate(
        yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())
    )
