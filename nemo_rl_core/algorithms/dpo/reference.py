"""The reference policy's logprobs of preference pairs."""

from dataclasses import replace
from pathlib import Path

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.trainer import TrainerSettings
from nemo_rl_core.data.pairs import PreferencePair, load_pairs, pair_batch
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.models.policy import Policy

_PAIRS_AT_ONCE = 1024
_MICROBATCH_TOKENS = 8192
"""A constant, so that a different micro-batch budget of training uses the same cached logprobs."""


def reference_logprobs(
    model_folder: Path, data: Path, session: ClusterSession, *, settings: TrainerSettings
) -> list[PreferencePair]:
    """Loads all pairs of a folder, and adds the logprobs of the reference in `model_folder`."""
    pairs = load_pairs(data, load_tokenizer(model_folder))
    longest = max(len(pair.chosen.token_ids) + len(pair.rejected.token_ids) for pair in pairs)
    policy = Policy(
        session,
        TrainingSetup(
            model_folder=model_folder,
            optimizer=OptimizerConfig(),
            max_tokens_per_microbatch=max(_MICROBATCH_TOKENS, 2 * longest),
            training=settings.training,
            dtype=settings.dtype,
            isolation=settings.isolation.training,
        ),
    )
    scored = []
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        part = pairs[start : start + _PAIRS_AT_ONCE]
        batch = pair_batch(part)
        logprobs = policy.get_logprobs(batch)["logprobs"]
        rows = [
            tuple(values[mask].tolist())
            for values, mask in zip(logprobs, batch["token_mask"], strict=True)
        ]
        scored += [
            replace(pair, reference_logprobs=(rows[2 * index], rows[2 * index + 1]))
            for index, pair in enumerate(part)
        ]
    return scored
