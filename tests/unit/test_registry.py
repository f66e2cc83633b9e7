"""Backends are registered and found by name."""

import pytest

from nemo_rl_core.backends import get_generation_backend, get_training_backend
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.registry import Registry


def test_built_in_backends_are_found_by_name() -> None:
    assert get_training_backend("dtensor").__name__ == "DTensorBackend"
    assert get_generation_backend("vllm").__name__ == "VllmBackend"


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="no training backend 'dtenser'") as caught:
        get_training_backend("dtenser")
    assert caught.value.expected == "dtensor, megatron"


def test_a_registered_class_is_found_and_listed() -> None:
    registry: Registry[object] = Registry("toy", {"builtin": "collections:OrderedDict"})

    @registry.register("own")
    class Own:
        pass

    assert registry.get("own") is Own
    with pytest.raises(ConfigError) as caught:
        registry.get("other")
    assert caught.value.expected == "builtin, own"
