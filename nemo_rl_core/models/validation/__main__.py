"""A model's checks as a command: `python -m nemo_rl_core.models.validation MODEL_FOLDER`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nemo_rl_core.errors import ConsistencyError, NemoRLError
from nemo_rl_core.models.validation.diagnostics import (
    THRESHOLD,
    model_folder,
    random_prompts,
    test_generation_consistency,
    test_max_model_len_respected,
)

_NUM_PROMPTS = 16
_MAX_NEW_TOKENS = 16


def _trainer_against_engine(folder: Path) -> str:
    """On one cluster, as in a run: weights are sent, then the engine samples."""
    from pydantic import TypeAdapter

    from nemo_rl_core.backends.generation.base import GenerationSetup
    from nemo_rl_core.config.generation import GenerationConfig
    from nemo_rl_core.distributed import session
    from nemo_rl_core.distributed.session import connect
    from nemo_rl_core.models.generation import VllmGeneration
    from nemo_rl_core.models.policy.short_forms import HuggingFacePolicy
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
        engine = VllmGeneration(connect(policy.words()["cluster"]), setup)
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


_CHECKS: dict[str, Callable[[Path], str]] = {
    "trainer-against-engine": _trainer_against_engine,
    "decode-against-prefill": _decode_against_prefill,
    "max-model-len": _max_model_len,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks one model, and prints a row a check.

    Returns:
        The exit code: 0 if all passed, else 1; 2 is argparse's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m nemo_rl_core.models.validation",
        description="Check that the rollout engine computes a model as the trainer does.",
    )
    parser.add_argument("model", help="a folder in the transformers layout, or a hub name")
    parser.add_argument("--only", choices=sorted(_CHECKS), help="one check instead of all")
    given = parser.parse_args(arguments)
    try:
        folder = model_folder(given.model)
    except NemoRLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    table, passed = Table("check", "result", "measured"), True
    for name in [given.only] if given.only else _CHECKS:
        try:
            table.add_row(name, "passed", _CHECKS[name](folder))
        except NemoRLError as error:
            table.add_row(name, "failed", str(error))
            passed = False
    Console().print(table)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
