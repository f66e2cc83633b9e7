"""How vLLM starts when its weights arrive afterwards: with zeros, so that no file is read twice.

vLLM's own format `dummy` is not for this: it overwrites persistent buffers, some of which are in
no checkpoint, with random numbers, and does not look whether the checkpoint has a head of its own
in spite of `tie_word_embeddings`.
"""

from functools import cache

import torch

from nemo_rl_core.config.generation import VllmGenerationConfig


def load_format_of(config: VllmGenerationConfig, *, has_gpu: bool) -> str:
    """The load format for an engine that takes its weights over before it completes anything.

    Args:
        config: Of the engine. What it names stays; so does `auto` with FP8, which makes scales of
            the first weights.
        has_gpu: Whether the engine computes on a GPU. On a CPU its first load packs weights.
    """
    is_open = has_gpu and config.load_format == "auto" and config.quantization == "none"
    return zeros_format() if is_open else config.load_format


@cache
def zeros_format() -> str:
    """Registers a loader with this process's vLLM that leaves all weights at 0; returns its name.

    Buffers keep what the model has made of them.
    """
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    name = "zeros"

    @register_model_loader(name)
    class ZerosLoader(BaseModelLoader):  # type: ignore[misc]
        """Weights of 0."""

        def download_model(self, model_config: ModelConfig) -> None:
            """Nothing is read."""

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            """Fills what the model has allocated, in which vLLM measures its memory."""
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()

    return name
