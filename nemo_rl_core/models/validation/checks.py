"""Checks of a model by name; each returns its measurement as text."""

from collections.abc import Callable
from pathlib import Path

from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.models.validation.diagnostics import (
    THRESHOLD,
    random_prompts,
    test_generation_consistency,
    test_max_model_len_respected,
)

_NUM_PROMPTS = 16
_MAX_NEW_TOKENS = 16


def _trainer_against_engine(folder: Path) -> str:
    from pydantic import TypeAdapter

    from nemo_rl_core.backends.generation.base import GenerationSetup
    from nemo_rl_core.config.generation import GenerationConfig
    from nemo_rl_core.distributed import session
    from nemo_rl_core.distributed.session import connect
    from nemo_rl_core.models.generation import VllmGeneration
    from nemo_rl_core.models.policy.pretrained import HuggingFacePolicy
    from nemo_rl_core.models.validation.logprobs import log_probability_error

    policy = HuggingFacePolicy(str(folder))
    sizes = {"max_new_tokens": _MAX_NEW_TOKENS, "max_num_seqs": _NUM_PROMPTS, "kv_cache_gib": 1}
    setup = GenerationSetup(
        model_folder=folder,
        config=TypeAdapter(GenerationConfig).validate_python(sizes),
        max_model_len=2 * _MAX_NEW_TOKENS,
        stop_token_ids=(),
    )
    try:
        engine = VllmGeneration(connect(policy.options()["cluster"]), setup)
        engine.update_weights(policy.policy)
        prompts = random_prompts(folder, lengths=range(1, _NUM_PROMPTS + 1))
        error = log_probability_error(policy, engine, prompts)
    finally:
        session.shutdown()
    if not error <= THRESHOLD:
        raise ConsistencyError(
            "trainer and engine disagree",
            expected=f"token_mult_prob_error of at most {THRESHOLD} (1 is agreement)",
            got=f"{error:.6g}",
        )
    return f"token_mult_prob_error {error:.6f}"


def _decode_against_prefill(folder: Path) -> str:
    return f"token_mult_prob_error {test_generation_consistency(folder):.6f}"


def _max_model_len(folder: Path) -> str:
    return f"longest sequence {test_max_model_len_respected(folder)} tokens"


CHECKS: dict[str, Callable[[Path], str]] = {
    "trainer-against-engine": _trainer_against_engine,
    "decode-against-prefill": _decode_against_prefill,
    "max-model-len": _max_model_len,
}
"""Each raises `ConsistencyError` if the model does not pass."""
