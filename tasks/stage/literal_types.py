"""Flyte types of recipes and artifacts: opaque values without a schema of their fields.

flytekit's own transformer writes the JSON schema of the nested recipe into every interface, which
takes megabytes and longer than all other imports together.
"""

from flytekit.core.constants import CACHE_KEY_METADATA, MESSAGEPACK, SERIALIZATION_FORMAT
from flytekit.core.type_engine import TypeEngine, TypeTransformer
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.annotation import TypeAnnotation
from flytekit.models.types import LiteralType, SimpleType, TypeStructure
from pydantic import BaseModel

from nemo_rl_core.config.base import FrozenConfig
from tasks.artifacts import Artifact


class OpaqueTransformer(PydanticTransformer):
    """flytekit's pydantic transformer for the subclasses of a class, without schemas."""

    def __init__(self, base: type[BaseModel]) -> None:
        TypeTransformer.__init__(
            self, f"Opaque {base.__name__}", base, enable_type_assertions=False
        )

    def get_literal_type(self, t: type[BaseModel]) -> LiteralType:
        """Returns a MessagePack struct type with the name of the class and no fields."""
        return LiteralType(
            simple=SimpleType.STRUCT,
            structure=TypeStructure(tag=getattr(t, "__origin__", t).__name__),
            annotation=TypeAnnotation({CACHE_KEY_METADATA: {SERIALIZATION_FORMAT: MESSAGEPACK}}),
        )


def register() -> None:
    """Registers the transformer for artifacts and recipes; call before defining tasks."""
    for base in (Artifact, FrozenConfig):
        if base not in TypeEngine._REGISTRY:
            TypeEngine.register(OpaqueTransformer(base))
