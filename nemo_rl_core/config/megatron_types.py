"""Model types of the `megatron` backend: its own, and Megatron-Bridge for others."""

from importlib import metadata

MEGATRON_TYPES = frozenset({"llama", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
"""The types that the backend builds and converts itself: the keys of its `FAMILIES`."""

BRIDGE, BRIDGE_VERSION = "megatron-bridge", "0.3.1"
"""The package that builds others where it is installed, and the version that is supported."""


def bridge_version() -> str | None:
    """The version of Megatron-Bridge that is installed."""
    try:
        return metadata.version(BRIDGE)
    except metadata.PackageNotFoundError:
        return None
