"""Model types of the `megatron` backend, and Megatron-Bridge for others."""

from importlib import metadata

MEGATRON_TYPES = frozenset({"llama", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
"""Types that the backend builds and converts without Megatron-Bridge: keys of its `FAMILIES`."""

BRIDGE, BRIDGE_VERSION = "megatron-bridge", "0.3.1"
"""Optional package that builds other types, and its supported version."""


def bridge_version() -> str | None:
    """Returns the installed version of Megatron-Bridge; None if it is not installed."""
    try:
        return metadata.version(BRIDGE)
    except metadata.PackageNotFoundError:
        return None
