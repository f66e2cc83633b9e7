"""Images that a cluster could not pull are refused before anything is registered."""

import pytest

from nemo_rl_core.errors import ConfigError
from tasks.pods import registry
from tasks.pods.images import LIGHT, REGISTRY, image_name

CLUSTERS = ["flyte.example.com", "dns:///flyte.example.com:443", "10.0.0.7:81", "localhost.example"]
OWN = ["localhost:30080", "dns:///localhost:30080", "127.0.0.1:81", "[::1]:81", "127.8.0.1"]


@pytest.mark.parametrize("endpoint", CLUSTERS)
def test_a_cluster_needs_a_registry(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REGISTRY, "")  # as a variable of a CI that nobody has set
    with pytest.raises(ConfigError, match="NEMO_RL_REGISTRY is not set") as refused:
        registry.refuse_missing_registry(endpoint)
    assert "export NEMO_RL_REGISTRY" in str(refused.value.fix)
    registered = {"workflow": "grpo", "endpoint": endpoint}
    with pytest.raises(ConfigError, match="registered without a registry"):
        registry.refuse_images_without_registry([image_name(LIGHT)], **registered)
    monkeypatch.setenv(REGISTRY, "registry.example/team")
    registry.refuse_missing_registry(endpoint)
    registry.refuse_images_without_registry([image_name(LIGHT)], **registered)


@pytest.mark.parametrize("endpoint", OWN)
def test_this_machine_needs_no_registry(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REGISTRY, raising=False)
    registry.refuse_missing_registry(endpoint)
    registry.refuse_images_without_registry([image_name(LIGHT)], workflow="grpo", endpoint=endpoint)
