"""Diagnostics of a model in the rollout engine; each starts an engine in a separate process.

Two have established names that begin with `test_`; pytest does not collect them.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.checkpoints.model_code import described_config
from nemo_rl_core.config.generation import GenerationConfig
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.data.pretrained import context_length
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConsistencyError, DataError, ModelError
from nemo_rl_core.models.columns import as_training_batch
from nemo_rl_core.models.policy.pretrained import local_folder
from nemo_rl_core.models.validation.gate import token_mult_prob_error

THRESHOLD = 1.05
"""The largest `token_mult_prob_error` that counts as agreement."""

_MAX_MODEL_LEN = 64
_START_SECONDS = 900.0


def test_max_model_len_respected(model_name: str | Path) -> int:
    """Requests more tokens than fit into the engine's `max_model_len`.

    Args:
        model_name: A folder in the transformers layout, or a hub name.

    Returns:
        The length of the longest sequence, in tokens.

    Raises:
        ConsistencyError: If a sequence is longer, or ended early, or was not marked as truncated,
            or a prompt that is too long was accepted.
        ModelError: If the model does not exist.
    """
    folder = folder_to_check(model_name)
    longest = min(_MAX_MODEL_LEN, context_length(folder) or _MAX_MODEL_LEN)
    setup = _setup(folder, max_model_len=longest, max_new_tokens=2 * longest)
    prompts = random_prompts(folder, lengths=[1, longest // 2, longest - 1])
    too_long = random_prompts(folder, lengths=[longest + 1])
    output, refused = _run(_generate_past_the_end, setup, prompts, too_long)
    lengths, truncated = output["unpadded_sequence_lengths"].tolist(), output["truncated"].tolist()
    if lengths != [longest] * len(lengths) or not all(truncated):
        raise ConsistencyError(
            "the engine does not keep to max_model_len",
            expected=f"sequences of {longest} tokens, all truncated",
            got=f"lengths {lengths}, truncated {truncated}",
        )
    if not refused:
        raise ConsistencyError(
            "the engine took a prompt that is longer than max_model_len",
            expected=f"at most {longest} tokens",
            got=f"{longest + 1} tokens",
        )
    return longest


def test_generation_consistency(model_name: str | Path) -> float:
    """Compares the engine's logprobs of decoding token by token with those of prefill.

    The two use different kernels and caches. The comparison reveals a wrong mask, position or
    cache, without a trainer.

    Args:
        model_name: A folder in the transformers layout, or a hub name.

    Returns:
        `token_mult_prob_error` between the two; 1 is perfect agreement.

    Raises:
        ConsistencyError: If it exceeds `THRESHOLD`.
        ModelError: If the model does not exist.
    """
    folder = folder_to_check(model_name)
    longest = min(_MAX_MODEL_LEN, context_length(folder) or _MAX_MODEL_LEN)
    setup = _setup(folder, max_model_len=longest, max_new_tokens=longest // 2)
    prompts = random_prompts(folder, lengths=[1, 3, longest // 4, longest // 2 - 1] * 4)
    error: float = _run(_decode_against_prefill, setup, prompts)
    if not error <= THRESHOLD:
        raise ConsistencyError(
            "the engine's logprobs of its samples differ between decoding and prefill",
            expected=f"token_mult_prob_error of at most {THRESHOLD} (1 is agreement)",
            got=f"{error:.4g}",
            fix="try dtype: float32; if that agrees, it is numerics, else vLLM has a fault with "
            "this architecture: evaluate and train it with the transformers engine",
        )
    return error


test_max_model_len_respected.__test__ = False  # type: ignore[attr-defined]
test_generation_consistency.__test__ = False  # type: ignore[attr-defined]


def folder_to_check(model_name: str | Path) -> Path:
    """Returns the folder of a model, in the transformers layout."""
    folder = local_folder(PretrainedModel(name=str(model_name)))
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model",
            expected="config.json and *.safetensors",
            got=", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing",
            fix="name the folder that a conversion or `save_pretrained` has written",
        )
    return folder


def random_prompts(folder: Path, *, lengths: Sequence[int]) -> BatchedDataDict:
    """Draws the same random prompts in each call: `input_ids [B, T]`, `input_lengths`, `seeds`."""
    config = described_config(folder).get_text_config()
    if not getattr(config, "vocab_size", 0):
        raise ModelError(f"{folder}/config.json has no vocab_size")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    columns = {
        "input_ids": ids,
        "input_lengths": torch.tensor(lengths),
        "seeds": torch.arange(len(lengths)),
    }
    return BatchedDataDict(columns)


def _setup(folder: Path, *, max_model_len: int, max_new_tokens: int) -> GenerationSetup:
    sizes = {"max_new_tokens": max_new_tokens, "max_num_seqs": 64, "kv_cache_gib": 1}
    return GenerationSetup(
        model_folder=folder,
        config=TypeAdapter(GenerationConfig).validate_python(sizes),
        max_model_len=max_model_len,
        stop_token_ids=(),  # so that every sequence reaches the limit
    )


def _run(function: Any, *args: Any) -> Any:
    return run_ranks(function, *args, world_size=1, timeout_seconds=_START_SECONDS)[0]


def _started(setup: GenerationSetup) -> Any:
    # Set before the import of vLLM, which reads them.
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # a single engine
    from nemo_rl_core.backends.generation.vllm import VllmBackend

    backend = VllmBackend()
    backend.setup(setup)
    return backend


def _generate_past_the_end(
    setup: GenerationSetup, prompts: BatchedDataDict, too_long: BatchedDataDict
) -> tuple[BatchedDataDict, bool]:
    backend = _started(setup)
    from vllm.exceptions import VLLMClientError

    output = backend.generate(prompts, greedy=False)
    try:
        backend.generate(too_long, greedy=False)
    except (VLLMClientError, DataError):
        return output, True
    return output, False


def _decode_against_prefill(setup: GenerationSetup, prompts: BatchedDataDict) -> float:
    backend = _started(setup)
    output = backend.generate(prompts, greedy=False)
    batch = as_training_batch(output)
    prefill = backend.prefill_logprobs(batch)
    decoded = output["logprobs"]
    return float(token_mult_prob_error(decoded[:, 1:], prefill[:, 1:], batch["token_mask"]))
