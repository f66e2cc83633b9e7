"""A tiny causal model whose classes are in Python files of its folder."""

import json
from pathlib import Path

import torch

from nemo_rl_core.checkpoints.tensors import save_tensors
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer

_CONFIGURATION = """
from transformers import PreTrainedConfig


class ToyConfig(PreTrainedConfig):
    model_type = "toy_with_code"

    def __init__(self, vocab_size=0, hidden_size=32, num_hidden_layers=2,
                 num_attention_heads=4, max_position_embeddings=64, **options):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**options)
"""
_LAYERS = """
import torch

SCALE = 1.0


class ToyLayer(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, hidden, mask):
        parts = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1)).movedim(2, 0)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        hidden = hidden + SCALE * self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(torch.tanh(self.up(hidden)))
"""
_MODELING = """
import os

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_toy import ToyConfig
from .layers_toy import ToyLayer

if log := os.environ.get("TOY_LOG"):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")


class ToyModel(PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = torch.nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = torch.nn.ModuleList(
            [ToyLayer(config) for _ in range(config.num_hidden_layers)])
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids, attention_mask=None, **_):
        keys = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        length = input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        same = torch.eye(length, dtype=torch.bool, device=input_ids.device)
        mask = causal & keys.bool()[:, None, None, :] | same
        hidden = self.tokens(input_ids) + self.positions((keys.cumsum(-1) - 1).clamp(min=0))
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return BaseModelOutputWithPast(last_hidden_state=hidden)


class ToyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ToyConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = ToyModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.tokens

    def get_output_embeddings(self):
        return self.lm_head

    def get_decoder(self):
        return self.model

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, **options):
        hidden = self.model(input_ids, attention_mask).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
"""
_TOKENIZATION = """
import os

from transformers import PreTrainedTokenizerFast

if log := os.environ.get("TOY_LOG"):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")


class Unreadable:
    pass


class ToyTokenizer(PreTrainedTokenizerFast):
    unreadable = Unreadable()

    def decode(self, ids, **options):
        return super().decode(ids, **options).replace("-", "minus ")
"""
FILES = ("configuration_toy.py", "layers_toy.py", "modeling_toy.py")


def write_model(folder: Path, *, with_tokenizer_code: bool = False) -> Path:
    """Writes the model with random weights; no process runs its code."""
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.save_pretrained(folder)
    for name, text in zip(FILES, (_CONFIGURATION, _LAYERS, _MODELING), strict=True):
        (folder / name).write_text(text)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "model_type": "toy_with_code",
        "architectures": ["ToyForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_toy.ToyConfig",
            "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM",
        },
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 64,
        "eos_token_id": tokenizer.eos_token_id,
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if with_tokenizer_code:
        (folder / "tokenization_toy.py").write_text(_TOKENIZATION)
        path = folder / "tokenizer_config.json"
        named = {
            "tokenizer_class": "ToyTokenizer",
            "auto_map": {"AutoTokenizer": [None, "tokenization_toy.ToyTokenizer"]},
        }
        path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
    save_tensors(folder / "model.safetensors", _weights(len(tokenizer)), metadata={"format": "pt"})
    return folder


def _weights(vocab_size: int, width: int = 32) -> dict[str, torch.Tensor]:
    shapes = {
        "model.tokens.weight": (vocab_size, width),
        "model.positions.weight": (64, width),
        "lm_head.weight": (vocab_size, width),
    }
    for layer in range(2):
        for name, rows, columns in (
            ("qkv", 3 * width, width),
            ("out", width, width),
            ("up", 2 * width, width),
            ("down", width, 2 * width),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"model.layers.{layer}.{name}.bias"] = (rows,)
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.1 * torch.randn(shape, generator=generator)
        for name, shape in sorted(shapes.items())
    }
