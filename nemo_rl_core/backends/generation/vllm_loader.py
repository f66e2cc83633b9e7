"""Starts vLLM with weights of zero if real ones arrive later, so that no file is read twice.

vLLM's format `dummy` does not fit: it overwrites persistent buffers, some of which are in no
checkpoint, with random numbers, and does not check whether the checkpoint has a separate head in
spite of `tie_word_embeddings`.
"""

from functools import cache

import torch

from nemo_rl_core.config.generation import VllmGenerationConfig


def load_format_of(config: VllmGenerationConfig, *, has_gpu: bool) -> str:
    """Returns the load format of an engine that receives weights before it generates.

    An explicit format is kept, and so is `auto` with FP8, which computes scales from weights.
    """
    is_open = has_gpu and config.load_format == "auto" and config.quantization == "none"
    return zeros_format() if is_open else config.load_format


@cache
def zeros_format() -> str:
    """Registers a loader with vLLM that sets all weights to 0; returns its name.

    Buffers keep the values that the model initialized them to.
    """
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    name = "zeros"

    @register_model_loader(name)
    class ZerosLoader(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: ModelConfig) -> None:
            """No-op."""

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()

    return name
