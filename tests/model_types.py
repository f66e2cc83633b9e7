"""Trains tiny models of the causal types of transformers and compares them with a plain loop.

`python -m tests.model_types [TYPE ...]` prints the lists of docs/model-types.md, by default
of all types.
"""

import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate

BOUND = 1e-4
_MOST_WEIGHTS = 3_000_000
MAX_TOKENS = 24
_LENGTHS = [11, 4, 7, 2, 9, 3]
_VOCABULARY = 99
_WIDTHS = dict.fromkeys(
    ["hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width"], 64
)
_INNER_WIDTHS = dict.fromkeys(
    ["intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "d_ff"], 96
)
_EXPERT_WIDTHS = dict.fromkeys(
    ["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32
)
_LAYERS = dict.fromkeys(
    ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"],
    2,
)
_HEADS = dict.fromkeys(
    ["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4
)
_HEAD_SIZES = dict.fromkeys(
    ["head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim", "rotary_dim", "kv_channels", "d_kv"],
    16,
)
_EXPERTS = dict.fromkeys(
    ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4
)
_CHOSEN = dict.fromkeys(
    ["num_experts_per_tok", "moe_k", "moe_topk", "num_key_value_heads", "multi_query_group_num"], 2
)
_ONE = dict.fromkeys(["n_shared_experts", "num_shared_experts", "n_group", "topk_group"], 1)
_STATE_SPACE = {
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_dt_rank": 4,
    "n_groups": 1,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "chunk_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SIZES: dict[str, Any] = {
    **_WIDTHS,
    **_INNER_WIDTHS,
    **_EXPERT_WIDTHS,
    **_LAYERS,
    **_HEADS,
    **_HEAD_SIZES,
    **_EXPERTS,
    **_CHOSEN,
    **_ONE,
    **_STATE_SPACE,
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "sliding_window": 6,
    "attention_window": 64,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "conv_L_cache": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 98,
    "is_decoder": True,
    "logits_scaling": 4.0,
    "logit_scale": 0.25,
    "final_logit_softcapping": 2.0,
    "attn_logit_softcapping": 0.5,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 32, "num_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
_WIDE: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    **dict.fromkeys(_WIDTHS, 128),
    **dict.fromkeys(["head_dim", "v_head_dim", "rotary_dim", "kv_channels", "d_kv"], 32),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim"], 64),
}
"""Widths that vLLM's CPU kernels support."""
_AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0},
    "axk1": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "falcon": {"ffn_hidden_size": 512},
    "falcon_h1": {"mamba_d_ssm": 256},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "lfm2": {"conv_dim": 128, "block_dim": 128},
    "mamba2": {"head_dim": 64, "num_heads": 4},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid"},
}
"""Fields of published configs that vLLM reads and transformers does not have or need."""


def tiny_config(kind: str, *, is_wide: bool = False, **changes: Any) -> Any:
    """Returns a config of a few thousand weights, with each kind of layer that its default has.

    Args:
        kind: The `model_type`.
        is_wide: Whether heads have the widths that vLLM's CPU kernels need.
        **changes: Config values to override.
    """
    cls = CONFIG_MAPPING[kind]
    default, aliases = cls().to_dict(), getattr(cls, "attribute_map", {})
    every = _SIZES | (_WIDE if is_wide else {})
    sizes = {name: value for name, value in every.items() if name in default or name in aliases}
    if "qk_rope_head_dim" in default:  # latent attention: the head size follows from its parts
        sizes = {**sizes, "num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    sizes = {name: value for name, value in sizes.items() if aliases.get(name) not in sizes}
    kinds = default.get("layer_types") or []
    if kinds:
        sizes["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
    special = _SPECIAL.get(kind, {}) | (_AS_PUBLISHED.get(kind, {}) if is_wide else {})
    return cls(**{**sizes, **special, **changes})


def tiny_model(kind: str, *, is_wide: bool = False, **changes: Any) -> Any:
    """Returns a model of that type with random weights, including norms and biases.

    Args:
        kind: The `model_type`.
        is_wide: Whether heads have the widths that vLLM's CPU kernels need.
        **changes: Config values to override.

    Raises:
        Exception: Any error of transformers, if the type has no config of this form.
    """
    config = tiny_config(kind, is_wide=is_wide, **changes)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if (count := sum(weight.numel() for weight in empty.parameters())) > _MOST_WEIGHTS:
        raise ValueError(f"its config of default sizes makes {count} weights")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape))
            else:
                weight.mul_(2)
    return model


def make_batch() -> BatchedDataDict:
    """Returns six sequences of unequal lengths whose first tokens are masked."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 19, (length,), generator=generator).tolist() for length in _LENGTHS]
    return collate(rows, [[index > 1 for index in range(length)] for length in _LENGTHS])


def make_backend(folder: Path, learning_rate: float = 1e-4, **settings: Any) -> DTensorBackend:
    """Returns the trainer of a folder, with micro-batches of several sequences."""
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(
                learning_rate=learning_rate, weight_decay=0.1, adam_epsilon=1e-3
            ),
            **{"max_tokens_per_microbatch": MAX_TOKENS, **settings},
        )
    )
    return backend


def plain_logprobs(model: torch.nn.Module, batch: BatchedDataDict) -> torch.Tensor:
    """Returns `[B, T-1]` of a transformers model, sequence by sequence; 0 where masked."""
    logprobs = torch.zeros(batch["token_mask"].shape)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        every = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
        logprobs[row, : length - 1] = every.gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs * batch["token_mask"]


def plain_router_loss(model: torch.nn.Module, batch: BatchedDataDict) -> torch.Tensor:
    """Returns the mean over sequences of transformers' load-balancing loss."""
    rows = zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True)
    losses = [model(ids[None, :length], output_router_logits=True).aux_loss for ids, length in rows]
    return torch.stack(losses).mean()


@dataclass(frozen=True)
class Steps:
    """Results of two training steps.

    Attributes:
        logprobs: `[B, T-1]` before and after the steps.
        losses: Loss of each step.
        grad_norms: Gradient norm of each step, before clipping.
    """

    logprobs: list[torch.Tensor]
    losses: list[float]
    grad_norms: list[float]

    def error(self, expected: "Steps") -> float:
        """Returns the largest difference of logprobs, losses and (relative) gradient norms."""
        logprobs = torch.stack(self.logprobs) - torch.stack(expected.logprobs)
        losses = torch.tensor(self.losses) - torch.tensor(expected.losses)
        norms = torch.tensor(self.grad_norms) / torch.tensor(expected.grad_norms) - 1
        return float(torch.cat([logprobs.flatten(), losses, norms]).abs().max())


def plain_steps(
    model: Any,
    batch: BatchedDataDict,
    learning_rate: float = 1e-4,
    *,
    router_aux_loss_coef: float = 0.0,
) -> Steps:
    """Trains a transformers model, sequence by sequence."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
    )
    steps = Steps([plain_logprobs(model, batch).detach()], [], [])
    for _ in range(2):
        optimizer.zero_grad()
        loss = -plain_logprobs(model, batch).sum() / batch["token_mask"].sum()
        balance = plain_router_loss(model, batch) if router_aux_loss_coef else torch.tensor(0.0)
        (loss + router_aux_loss_coef * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.losses.append(loss.item())
        steps.grad_norms.append(norm.item())
    steps.logprobs.append(plain_logprobs(model, batch).detach())
    return steps


def backend_steps(
    backend: DTensorBackend, batch: BatchedDataDict, shard: BatchedDataDict | None = None
) -> Steps:
    """Trains on a rank's shard of a batch, or on the full batch."""
    steps = Steps([backend.get_logprobs(batch)], [], [])
    for _ in range(2):
        metrics = backend.train_step(batch if shard is None else shard, NLLLoss())
        steps.losses.append(metrics["loss"])
        steps.grad_norms.append(metrics["grad_norm"])
    steps.logprobs.append(backend.get_logprobs(batch))
    return steps


@dataclass(frozen=True)
class Outcome:
    """Result of training a type.

    Attributes:
        kind: The `model_type`.
        error: The largest difference from the plain loop: of logprobs before and after two steps,
            of the loss and the gradient norm, and of the saved model; infinity if the type is
            refused.
        shares_rows: Whether several sequences are packed into a row.
        refused: The error if the model is refused.
    """

    kind: str
    error: float = float("inf")
    shares_rows: bool = False
    refused: str = ""


def outcome(kind: str, folder: Path) -> Outcome:
    """Trains a tiny model of a type in an empty folder and compares it with a plain loop."""
    tiny_model(kind).save_pretrained(folder / "start")
    save_tokenizer(folder)
    try:
        return _trained(kind, folder)
    except Exception as error:  # noqa: BLE001  (of any type: whatever ends the training)
        return Outcome(kind, refused=f"{type(error).__name__}: {error}".splitlines()[0])


def save_tokenizer(folder: Path) -> None:
    """Writes the tokenizer of the arithmetic tasks into the folder `start`."""
    small = ModelFromConfig(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
    materialize(small, folder / "small", seed=0)
    load_tokenizer(folder / "small").save_pretrained(folder / "start")


def _trained(kind: str, folder: Path) -> Outcome:
    batch, backend = make_batch(), make_backend(folder / "start")
    steps = backend_steps(backend, batch)
    backend.save_checkpoint(folder / "saved")
    with torch.no_grad():
        saved = plain_logprobs(loaded(folder / "saved" / "model"), batch)
    errors = [
        steps.error(plain_steps(loaded(folder / "start"), batch)),
        float((steps.logprobs[-1] - saved).abs().max()),
    ]
    return Outcome(kind, max(errors), backend._policy.shares_rows)


def loaded(folder: Path) -> Any:
    """Loads a model in transformers with eager attention, in float32."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _outcomes(kinds: list[str]) -> Iterator[Outcome | str]:
    """Yields the outcome of each type, or its name if no tiny model can be created."""
    for kind in kinds:
        try:
            tiny_model(kind)
        except Exception:  # noqa: BLE001  (whatever its config refuses)
            yield kind
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield outcome(kind, Path(folder))


def main() -> None:
    """Prints the lists."""
    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    kinds = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    outcomes = list(_outcomes(kinds))
    tried = [each for each in outcomes if isinstance(each, Outcome)]
    exact = [each for each in tried if each.error < BOUND]
    packed = [each.kind for each in exact if each.shares_rows]
    apart = [each.kind for each in exact if not each.shares_rows]
    others = [each for each in tried if each.error >= BOUND]
    unbuilt = [each for each in outcomes if isinstance(each, str)]
    write, worst = sys.stdout.write, max((each.error for each in exact), default=0.0)
    write(f"{len(exact)} of {len(tried)} types are exact to {BOUND}; the worst to {worst:.1e}\n")
    write(f"\nSequences share rows ({len(packed)}): {', '.join(packed)}.\n")
    write(f"\nOne sequence per row ({len(apart)}): {', '.join(apart)}.\n")
    write(f"\nNot exact or refused ({len(others)}):\n")
    for each in others:
        write(f"- {each.kind}: {each.refused or f'differs by {each.error:.1e}'}\n")
    write(f"\nNot tried ({len(unbuilt)}): {', '.join(unbuilt)}.\n")


if __name__ == "__main__":
    main()
