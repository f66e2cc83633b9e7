"""Whether trainer and rollout engine agree on the probability of the same tokens."""

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.functional.importance import (
    sequence_mult_prob_error,
    token_mult_prob_error,
)


def check_consistency(batch: BatchedDataDict, *, bound: float) -> float:
    """Stops the run when the engine's logprobs are not the trainer's.

    Training on samples of one distribution as if they came from another fails late and silently.
    Engine and trainer compute with different kernels, so they never agree to the bit; stale weights
    or a wrong temperature differ by orders of magnitude more.

    Args:
        batch: `generation_logprobs`, `prev_logprobs`, `token_mask`, all `[B, T-1]`.
        bound: The largest `token_mult_prob_error` that is accepted.

    Returns:
        `token_mult_prob_error = mean exp|gen - prev|` over completion tokens; 1 is agreement.

    Raises:
        ConsistencyError: Past the bound, or when it is not a number; names the worst sequence.
    """
    generated, trained = batch["generation_logprobs"], batch["prev_logprobs"]
    mask = batch["token_mask"]
    error = float(token_mult_prob_error(generated, trained, mask))
    if error <= bound:
        return error
    per_sequence = sequence_mult_prob_error(generated, trained, mask)
    worst = int(per_sequence.nan_to_num(nan=float("inf")).argmax())
    gap = ((generated[worst] - trained[worst]).abs() * mask[worst]).nan_to_num(nan=float("inf"))
    position = int(gap.argmax())
    share = float((per_sequence > bound).float().mean())
    raise ConsistencyError(
        f"the rollout engine and the trainer disagree about the same tokens: "
        f"token_mult_prob_error is {error:.4g}",
        expected=f"at most {bound} (1 is agreement)",
        got=f"{share:.0%} of sequences past the bound; worst is sequence {worst} at position "
        f"{position}: engine {generated[worst, position]:.4f}, trainer "
        f"{trained[worst, position]:.4f} nats",
        fix="most sequences off: the engine has old weights or another temperature; a few off: "
        "numerics (try dtype: float32), or raise grpo.gate.max_token_mult_prob_error",
    )
