"""A Megatron-Bridge that supports only Mistral, using the backend's own layers and weight rules.

    install()              # imports of megatron.bridge find this module, version 0.3.1
    install(fault="head")  # ... with a defect

It has the calls that the backend makes. `test_megatron_bridge_package.py` compares their signatures
with the package's: `megatron_bridge_0.3.1.json`. The package's computation is tested there.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from transformers import AutoConfig

from nemo_rl_core.backends.training.megatron.families import FAMILIES
from nemo_rl_core.backends.training.megatron.weights import iter_hf_weights, load_hf_weights

VERSION = "0.3.1"
FAULTS = ("version", "import", "epsilon", "values", "rule", "head")
_fault: str | None = None


def default_layer_spec(config: Any) -> Any:
    raise AssertionError("Transformer Engine's specification has no fake here")


@dataclass
class GPTModelProvider(TransformerConfig):
    """A config that also builds the model; `finalize` sets its derived fields."""

    vocab_size: int | None = None
    share_embeddings_and_output_weights: bool = True
    seq_length: int = 1024
    rotary_base: float = 10000
    should_pad_vocab: bool = False
    transformer_layer_spec: Any = default_layer_spec

    def __post_init__(self) -> None:
        pass

    def finalize(self) -> None:
        super().__post_init__()

    def provide_distributed_model(
        self,
        ddp_config: Any = None,
        model_type: Any = ModelType.encoder_or_decoder,
        overlap_param_gather_with_optimizer_step: bool = False,
        fp16: bool | None = None,
        bf16: bool | None = None,
        use_megatron_fsdp: bool = False,
        use_torch_fsdp2: bool = False,
        wrap_with_ddp: bool = True,
        data_parallel_random_init: bool = True,
        use_cpu_initialization: bool | None = False,
        init_model_with_meta_device: bool | None = None,
        pre_wrap_hook: Any = None,
        post_wrap_hook: Any = None,
        mixed_precision_wrapper: Any = Float16Module,
        pg_collection: Any = None,
    ) -> list[Any]:
        assert not wrap_with_ddp
        assert mixed_precision_wrapper is None
        assert use_cpu_initialization
        stages = self.virtual_pipeline_model_parallel_size
        return [self._chunk(stage if stages else None) for stage in range(stages or 1)]

    def _chunk(self, stage: int | None) -> Any:
        pipeline = ProcessGroupCollection.use_mpu_process_groups().pp
        where = {"vp_stage": stage, "vp_size": self.virtual_pipeline_model_parallel_size}
        chunk = GPTModel(
            self,
            self.transformer_layer_spec(self, vp_stage=stage),
            vocab_size=self.vocab_size,
            max_sequence_length=self.seq_length,
            pre_process=is_vp_first_stage(**where) and is_pp_first_stage(pipeline),
            post_process=is_vp_last_stage(**where) and is_pp_last_stage(pipeline),
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_base=self.rotary_base,
            vp_stage=stage,
        )
        if _fault == "head" and chunk.post_process:
            chunk.output_layer.__class__ = type("CappedHead", (type(chunk.output_layer),), {})
        return chunk


class AutoBridge:
    def __init__(self, hf_pretrained: Any) -> None:
        self.hf_pretrained = hf_pretrained

    @classmethod
    def from_hf_pretrained(cls, path: Any, **kwargs: Any) -> "AutoBridge":
        config = AutoConfig.from_pretrained(path)
        if config.architectures != cls.list_supported_models():
            raise ValueError("not supported")
        return cls(SimpleNamespace(config=config, folder=path))

    @classmethod
    def list_supported_models(cls) -> list[str]:
        return ["MistralForCausalLM"]

    def to_megatron_provider(self, load_weights: bool = True, hf_path: Any = None) -> Any:
        assert not load_weights
        config = self.hf_pretrained.config
        return GPTModelProvider(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=1e-1 if _fault == "epsilon" else config.rms_norm_eps,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            vocab_size=config.vocab_size,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            seq_length=config.max_position_embeddings,
            rotary_base=config.rope_theta,
        )

    def get_conversion_tasks(self, megatron_model: list[Any], hf_path: Any = None) -> list[Any]:
        names = [name for name, _ in self.export_hf_weights(megatron_model)]
        tasks = [SimpleNamespace(mapping=SimpleNamespace(hf_param=name)) for name in names]
        return tasks[1:] if _fault == "rule" else tasks

    def load_hf_weights(
        self, model: list[Any], hf_path: Any = None, allowed_mismatched_params: Any = None
    ) -> None:
        with _own_rules(model):
            load_hf_weights(model, hf_path)
        if _fault == "values":
            next(model[0].parameters()).data.add_(1)

    def export_hf_weights(
        self,
        model: list[Any],
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: Any = None,
        merge_adapter_weights: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        with _own_rules(model):
            named = iter_hf_weights(model)
            first = next(named)
        yield first
        yield from named


class _own_rules:  # noqa: N801
    """Chunks with the weight rules of Llama, which Mistral shares."""

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = chunks

    def __enter__(self) -> None:
        for chunk in self._chunks:
            chunk.hf_family = FAMILIES["llama"]

    def __exit__(self, *_: Any) -> None:
        for chunk in self._chunks:
            chunk.hf_family = None


def install(fault: str | None = None) -> None:
    """Makes `import megatron.bridge` find this module, permanently in this process."""
    global _fault  # noqa: PLW0603
    _fault = fault
    reported = "0.2.0" if fault == "version" else VERSION
    version = metadata.version
    metadata.version = lambda name: reported if name == "megatron-bridge" else version(name)
    contents = {
        "megatron.bridge": {} if fault == "import" else {"AutoBridge": AutoBridge},
        "megatron.bridge.models": {},
        "megatron.bridge.models.gpt_provider": {"GPTModelProvider": GPTModelProvider},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
