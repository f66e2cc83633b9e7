"""What Flyte is told of recipes and artifacts: that each is one value, and nothing of its fields.

flytekit's own transformer writes the JSON schema of a whole nested recipe into the interface of
every task and workflow that takes it. A screen of schema is no help on a command line, the schemas
of a pipeline fill megabytes of what is registered, and describing them takes longer than all other
imports together. The values themselves travel as before, and are validated where they arrive.
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
    """Values as flytekit's pydantic transformer writes and reads them, without their schema.

    Args:
        base: The pydantic class whose subclasses it serves.
    """

    def __init__(self, base: type[BaseModel]) -> None:
        TypeTransformer.__init__(
            self, f"Opaque {base.__name__}", base, enable_type_assertions=False
        )

    def get_literal_type(self, t: type[BaseModel]) -> LiteralType:
        """A struct in MessagePack with the name of its class; Flyte does not know its fields."""
        return LiteralType(
            simple=SimpleType.STRUCT,
            structure=TypeStructure(tag=getattr(t, "__origin__", t).__name__),
            annotation=TypeAnnotation({CACHE_KEY_METADATA: {SERIALIZATION_FORMAT: MESSAGEPACK}}),
        )


def register() -> None:
    """Makes flytekit use it for artifacts and recipes; must come before any task is defined."""
    for base in (Artifact, FrozenConfig):
        if base not in TypeEngine._REGISTRY:
            TypeEngine.register(OpaqueTransformer(base))
