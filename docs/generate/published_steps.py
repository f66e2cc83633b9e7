"""Published GRPO step times, and the roofline's estimates of the same steps.

All rows are measurements of NVIDIA's NeMo RL on H100s, with vLLM, in bfloat16, on policy: 2,048 or
512 completions per step, up to 4,096 or 8,192 tokens with the prompt. Lengths are means. A row
without parts has only the seconds of a step. Settings that a table leaves out are taken from the
recipes of the same release (`examples/configs/grpo_math_*_megatron.yaml` and
`recipes/llm/performance/`). The DTensor layout of the 70B is not published; it is assumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining, TrainingConfig
from nemo_rl_core.planning.accelerators import ACCELERATORS
from nemo_rl_core.planning.load import SamplingLoad, StageLoad, TrainingLoad
from nemo_rl_core.planning.memory import plan_memory
from nemo_rl_core.planning.sizes import sizes_of
from nemo_rl_core.planning.speed import plan_speed

_PROMPT_TOKENS = 100
"""Tokens of a problem of OpenMathInstruct-2 with its instruction. Assumed."""
PARTS = ("training", "logprobs", "rollouts", "weight sync")
"""Parts of a step, in the order of `StepSetting.seconds`."""
PART_FACTOR = 1.8
"""Factor within which the roofline estimates the seconds of each part of every step in `STEPS`;
`planning.speed.TOTAL_FACTOR` is that of the total. The parts of 8B and 70B and the totals of
30B-A3B were fitted; 32B, 235B and the step on 16 GPUs were not."""


def _dense(kind: str, widths: tuple[int, ...], *, tied: bool = False) -> dict[str, Any]:
    layers, hidden, heads, kv_heads, mlp, vocabulary = widths
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


_QWEN_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
MODELS: Mapping[str, dict[str, Any]] = {
    "Llama 3.2 1B": _dense("llama", (16, 2048, 32, 8, 8192, 128_256), tied=True),
    "Llama 3.1 8B": _dense("llama", (32, 4096, 32, 8, 14_336, 128_256)),
    "Llama 3.1 70B": _dense("llama", (80, 8192, 64, 8, 28_672, 128_256)),
    "Llama 3.1 405B": _dense("llama", (126, 16_384, 128, 8, 53_248, 128_256)),
    "Qwen3 32B": {**_dense("qwen3", (64, 5120, 64, 8, 25_600, 151_936)), "head_dim": 128},
    "Qwen3 30B-A3B": {
        **_dense("qwen3_moe", (48, 2048, 32, 4, 6144, 151_936)),
        **_QWEN_EXPERTS,
        "moe_intermediate_size": 768,
    },
    "Qwen3 235B-A22B": {
        **_dense("qwen3_moe", (94, 4096, 64, 4, 12_288, 151_936)),
        **_QWEN_EXPERTS,
        "moe_intermediate_size": 1536,
    },
}
"""Values of each model's published config.json that sizes depend on."""


@dataclass(frozen=True)
class StepSetting:
    """Settings of a GRPO step.

    Attributes:
        model: One of `MODELS`.
        num_gpus: Number of H100s, which trainer and engines use in turn.
        training: Layout of the trained model.
        engine_gpus: Number of tensor-parallel ranks of an engine.
        mean_tokens: Mean length of a sequence with its prompt.
        max_tokens: Maximum length of a sequence.
        num_sequences: Number of sequences per step.
        num_trained_at_once: Number of sequences per optimizer step.
        prompt_tokens: Length of a prompt.
        engine_memory: Fraction of a GPU that an engine reserves.
    """

    model: str
    num_gpus: int
    training: TrainingConfig
    engine_gpus: int
    mean_tokens: float
    max_tokens: int = 4096
    num_sequences: int = 2048
    num_trained_at_once: int = 512
    prompt_tokens: int = _PROMPT_TOKENS
    engine_memory: float = 0.6

    @property
    def load(self) -> StageLoad:
        """Load for a plan: rows of `max_tokens`, logprobs of policy and reference."""
        sizes = sizes_of(MODELS[self.model])
        engines = self.num_gpus // self.engine_gpus
        generation = VllmGenerationConfig(
            num_engines=engines,
            tensor_parallel_size=self.engine_gpus,
            gpu_memory_utilization=self.engine_memory,
        )
        completion = self.max_tokens - self.prompt_tokens
        return StageLoad(
            "grpo_iteration",
            sizes,
            ClusterConfig(shape="cluster", num_workers=self.num_gpus),
            "bfloat16",
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion,
            training=TrainingLoad(
                self.training,
                self.max_tokens,
                path="grpo.max_tokens_per_microbatch",
                num_sequences=self.num_trained_at_once,
                reference=sizes,
                num_scorings=2,
            ),
            sampling=SamplingLoad(
                generation,
                "generation",
                self.num_sequences,
                mean_completion_tokens=self.mean_tokens - self.prompt_tokens,
            ),
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Estimated seconds of each of `PARTS`, with NeMo RL's way of transferring weights."""
        return dict(_seconds(self))


@cache
def _seconds(setting: StepSetting) -> Mapping[str, float]:
    gpu, load = ACCELERATORS["nvidia-h100"], setting.load
    speed = plan_speed(load, plan_memory(load, gpu.memory_gib), gpu)
    assert speed is not None
    assert speed.transfer is not None
    parts = (
        speed.training_seconds,
        speed.scoring_seconds,
        speed.rollout_seconds,
        speed.transfer.published_seconds,
    )
    return dict(zip(PARTS, parts, strict=True))


@dataclass(frozen=True)
class Published:
    """A published measurement of a step.

    Attributes:
        setting: Settings of the step.
        source: A key of `SOURCES`.
        total_seconds: Duration of the step.
        parts: Seconds of each of `PARTS` if published, else None.
    """

    setting: StepSetting
    source: str
    total_seconds: float
    parts: Mapping[str, float] | None = None


SOURCES = {
    "A": "NVIDIA, NeMo-RL V0.3: Scalable and Performant Post-training with Nemo-RL via "
    "Megatron-Core, 21 July 2025, as quoted in NVIDIA-NeMo/RL issue 959",
    "B": "SB Intuitions' run of the same, NVIDIA-NeMo/RL issue 959, 21 August 2025",
    "C": "NVIDIA, NeMo RL 0.5, docs/about/performance-summary.md",
    "D": "NVIDIA, NeMo RL 0.6, docs/about/performance-summary.md",
}
"""Where the rows of `STEPS` stand."""


def _megatron(**sizes: int) -> MegatronTraining:
    names = {"tensor": "tensor_parallel_size", "pipeline": "pipeline_parallel_size",
             "context": "context_parallel_size", "expert": "expert_parallel_size"}  # fmt: skip
    return MegatronTraining.model_validate({names[name]: size for name, size in sizes.items()})


def _llama(
    model: str, training: TrainingConfig, tokens: int, source: str, *seconds: float
) -> Published:
    """Returns a row with parts.

    Args:
        model: A model of 8B on one machine, or of 70B on eight.
        training: Layout of the model.
        tokens: Mean length of a completion.
        source: A key of `SOURCES`.
        seconds: The total, then the seconds of each of `PARTS`.
    """
    num_gpus, engine_gpus = (8, 1) if model.endswith("8B") else (64, 4)
    setting = StepSetting(model, num_gpus, training, engine_gpus, tokens + _PROMPT_TOKENS)
    return Published(setting, source, seconds[0], dict(zip(PARTS, seconds[1:], strict=True)))


def _largest(tokens: float) -> StepSetting:
    training = _megatron(tensor=2, context=2, expert=16, pipeline=8)
    return StepSetting(
        "Qwen3 235B-A22B", 128, training, 16, tokens, max_tokens=8192, num_sequences=512
    )


_EIGHT = _megatron(pipeline=2)
_SEVENTY = _megatron(tensor=4, pipeline=4)
_SHARDED = DTensorTraining(activation_checkpointing=True)
_SHARDED_8 = DTensorTraining(activation_checkpointing=True, tensor_parallel_size=8)
STEPS: tuple[Published, ...] = (
    _llama("Llama 3.1 8B", _EIGHT, 795, "A", 112, 28, 18, 58, 5),
    _llama("Llama 3.1 8B", _EIGHT, 811, "B", 116, 27, 18, 56, 8),
    _llama("Llama 3.1 8B", _SHARDED, 777, "A", 122, 38, 19, 57, 4),
    _llama("Llama 3.1 8B", _SHARDED, 802, "B", 129, 40, 19, 55, 6),
    _llama("Llama 3.1 70B", _SEVENTY, 398, "A", 147, 28, 18, 84, 14),
    _llama("Llama 3.1 70B", _SEVENTY, 396, "B", 178, 31, 20, 87, 26),
    _llama("Llama 3.1 70B", _SHARDED_8, 395, "A", 230, 97, 28, 82, 15),
    _llama("Llama 3.1 70B", _SHARDED_8, 411, "B", 266, 117, 29, 88, 20),
    Published(StepSetting("Llama 3.1 8B", 16, _EIGHT, 1, 1019), "C", 92.8),
    Published(StepSetting("Qwen3 32B", 32, _SEVENTY, 4, 3251), "C", 376),
    Published(StepSetting("Qwen3 30B-A3B", 32, _megatron(expert=8), 2, 3196), "C", 198),
    Published(StepSetting("Qwen3 30B-A3B", 32, _megatron(expert=8), 2, 3203), "D", 192),
    Published(_largest(5700), "C", 431),
    Published(_largest(5698), "D", 395),
)
"""Every step on policy and in bfloat16 on H100s of those tables whose model plans know exactly."""
