"""The gate of a step, which excludes samples on which trainer and rollout engine disagree."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.functional.kl import kl_estimate
from nemo_rl_core.functional.masked import (
    masked_mean,
    masked_sequence_mean,
    masked_sum,
    valid_token_mask,
)

_INF = float("inf")
_NUM_NAMED = 3


def token_mult_prob_error(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """Computes `mean exp|gen - prev|`, the mean factor by which the two probabilities differ.

    1 is agreement; 1.05 is the usual alarm. It is 0 only without valid tokens. Source: NeMo RL's
    `token_mult_prob_error`.

    Args:
        generation_logprobs: `[B, T-1]` logprobs of the engine.
        trainer_logprobs: `[B, T-1]` logprobs of the trainer's weights at the start of the step.
        mask: `[B, T-1]` bool.
    """
    return masked_mean(torch.exp((generation_logprobs - trainer_logprobs).abs()), mask)


def sequence_mult_prob_error(
    generation_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """Computes `token_mult_prob_error` of each sequence, to identify outliers."""
    return masked_sequence_mean(torch.exp((generation_logprobs - trainer_logprobs).abs()), mask)


def check_consistency(
    batch: BatchedDataDict,
    gate: GateConfig,
    *,
    reference: str = "the trainer",
    version: int | None = None,
) -> tuple[BatchedDataDict, dict[str, float]]:
    """Masks out inconsistent sequences, and raises an error if there are too many.

    Training on samples of one distribution as if they came from another fails late and silently.
    Engine and trainer use different kernels, so their logprobs are never bitwise identical; stale
    weights or a wrong temperature make differences that are orders of magnitude larger.

    Args:
        batch: `generation_logprobs`, `prev_logprobs`, `token_mask`, all `[B, T-1]`, and
            `sample_mask [B]`.
        reference: Name of the model that computed `prev_logprobs`, for errors.
        version: Version of the trainer's weights. If the batch has `weight_versions`, only tokens
            of this version are compared, and the metrics include `staleness`.

    Returns:
        The batch, with `sample_mask` 0 for sequences past the bound; their logprobs that are not
        finite become 0, as means over all rows include them. A batch without such sequences is
        returned unchanged. The metrics are `token_mult_prob_error = mean exp|gen - prev|` over the
        remaining tokens (1 is perfect agreement) and `num_inconsistent_sequences`.

    Raises:
        ConsistencyError: If the remaining tokens exceed their bound on average, or too large a
            fraction of the sequences is masked out; names the worst positions and a likely cause.
    """
    if version is not None and "weight_versions" in batch:
        age, written = version - batch["weight_versions"], batch["token_mask"].bool()
        current = BatchedDataDict({**batch, "token_mask": written & (age == 0)})
        checked, metrics = check_consistency(current, gate, reference=reference)
        ages = {
            "staleness": float(age[written].float().mean()),
            "staleness_max": float(age[written].max()),
        }
        return BatchedDataDict({**checked, "token_mask": batch["token_mask"]}), metrics | ages
    generated, trained = batch["generation_logprobs"], batch["prev_logprobs"]
    sampled = batch["sample_mask"].bool()
    mask = valid_token_mask(batch["token_mask"], sampled)
    per_sequence = sequence_mult_prob_error(generated, trained, mask)
    is_off = _is_off(per_sequence, gate)
    num_off = int(is_off.sum())
    kept = mask & ~is_off[:, None]
    error = float(token_mult_prob_error(generated, trained, kept))
    share = num_off / max(int(sampled.sum()), 1)
    if share > gate.max_masked_fraction:
        raise _error(
            f"{num_off} of {int(sampled.sum())} sequences exceed the bound of a sequence",
            f"at most {gate.max_masked_fraction:.0%} past {gate.max_sequence_mult_prob_error}",
            _Disagreement(generated, trained, mask, per_sequence, reference),
            gate,
        )
    if not error <= gate.max_token_mult_prob_error:
        raise _error(
            f"token_mult_prob_error is {error:.4g}",
            f"at most {gate.max_token_mult_prob_error} (1 is agreement)",
            _Disagreement(generated, trained, mask, per_sequence, reference),
            gate,
        )
    metrics = {"token_mult_prob_error": error, "num_inconsistent_sequences": float(num_off)}
    return (_without(batch, is_off) if num_off else batch), metrics


def agreement(
    batch: BatchedDataDict, gate: GateConfig, *, version: int | None = None
) -> dict[str, float]:
    """Sums up the rows of a rank, so that the gate can be checked without their values.

    Args:
        batch: Same as in `check_consistency`, with `compared_mask [B]` for the rows of the gate;
            `sample_mask [B]` is also 0 for rows that are left out after the gate.

    Returns:
        Sums over the rows: number `num_off` of sequences past their bound; `error` and `num_tokens`
        of `token_mult_prob_error`; `kl`, `ratio` and `num_trained` of the rows that are trained on;
        and with a version `age` over the `num_written` tokens, and the largest age, `age_max`.
    """
    generated, trained = batch["generation_logprobs"], batch["prev_logprobs"]
    mask = valid_token_mask(batch["token_mask"], batch["compared_mask"])
    trained_mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    ages: dict[str, Tensor] = {}
    if version is not None and "weight_versions" in batch:
        written, age = batch["token_mask"].bool(), version - batch["weight_versions"]
        mask = mask & (age == 0)
        ages = {
            "age": (age * written).sum(),
            "age_max": torch.where(written, age, 0).amax() if written.any() else age.new_zeros(()),
            "num_written": written.sum(),
        }
    is_off = _is_off(sequence_mult_prob_error(generated, trained, mask), gate)
    one = torch.ones(())
    values = {
        "error": (torch.exp((generated - trained).abs()), mask),
        "kl": (kl_estimate(generated, trained, kind="k3"), trained_mask),
        "ratio": (torch.exp(trained - generated), trained_mask),
    }
    sums = {name: masked_sum(*each, denominator=one) for name, each in values.items()}
    counts = {"num_off": is_off.sum(), "num_tokens": mask.sum(), "num_trained": trained_mask.sum()}
    return {name: value.item() for name, value in (counts | sums | ages).items()}


def agreement_metrics(
    parts: Sequence[Mapping[str, float]], gate: GateConfig
) -> dict[str, float] | None:
    """Computes metrics of `check_consistency` and `rollout_metrics` from the sums of all ranks.

    Returns:
        The metrics; None if a bound is exceeded, which `check_consistency` must then handle.
    """
    total = {name: torch.tensor([part[name] for part in parts]).sum() for name in parts[0]}
    error = float(total["error"] / total["num_tokens"].clamp(min=1))
    if total["num_off"] or not error <= gate.max_token_mult_prob_error:
        return None
    num_trained = total["num_trained"].clamp(min=1)
    ages = {}
    if "age" in total:
        ages = {
            "staleness": float(total["age"].float() / total["num_written"]),
            "staleness_max": float(max(part["age_max"] for part in parts)),
        }
    return {
        **ages,
        "token_mult_prob_error": error,
        "num_inconsistent_sequences": 0.0,
        "kl_generation_trainer": float(total["kl"] / num_trained),
        "sampling_importance_ratio": float(total["ratio"] / num_trained),
    }


def _is_off(per_sequence: Tensor, gate: GateConfig) -> Tensor:
    # Not `per_sequence > bound`: NaN and infinity exceed every bound.
    return ~(per_sequence <= gate.max_sequence_mult_prob_error) | per_sequence.isinf()


def _without(batch: BatchedDataDict, is_off: Tensor) -> BatchedDataDict:
    changed = {"sample_mask": batch["sample_mask"] * ~is_off}
    for name in ("generation_logprobs", "prev_logprobs"):
        unusable = is_off[:, None] & ~batch[name].isfinite()
        changed[name] = batch[name].masked_fill(unusable, 0.0)
    return BatchedDataDict({**batch, **changed})


class _Disagreement:
    """A description for error messages of where two sets of logprobs `[B, T-1]` differ."""

    def __init__(
        self,
        generated: Tensor,
        trained: Tensor,
        mask: Tensor,
        per_sequence: Tensor,
        reference: str,
    ) -> None:
        self._generated, self._trained, self.reference = generated, trained, reference
        gap = (generated - trained).abs()
        self._gap = torch.where(mask, gap.nan_to_num(nan=_INF, posinf=_INF), -1.0)
        self._errors = per_sequence.nan_to_num(nan=_INF, posinf=_INF)
        self._num_compared = int(mask.any(dim=1).sum())

    def share_past(self, bound: float) -> float:
        return int((self._errors > bound).sum()) / max(self._num_compared, 1)

    def worst(self) -> str:
        """Describes the worst sequences, each with its worst position; a row is a rollout.

        Positions count from the first token of the prompt, which has no logprob.
        """
        order = self._errors.argsort(descending=True, stable=True)[:_NUM_NAMED].tolist()
        return "; ".join(self._at(row) for row in order if self._errors[row] > 1)

    def _at(self, row: int) -> str:
        index = int(self._gap[row].argmax())
        return (
            f"sequence {row} ({self._errors[row]:.4g}) at position {index + 1}: engine "
            f"{self._generated[row, index]:.4f}, {self.reference.removeprefix('the ')} "
            f"{self._trained[row, index]:.4f} nats"
        )


def _error(
    measured: str, expected: str, disagreement: _Disagreement, gate: GateConfig
) -> ConsistencyError:
    share = disagreement.share_past(gate.max_token_mult_prob_error)
    if share > 0.5:
        cause = (
            "most sequences are off, so the engine probably has old weights or a different "
            "temperature: look at the weight sync and at what changed since the last step"
        )
    else:
        cause = (
            "few sequences are off, so it is probably numerics: try dtype: float32, take "
            "training.float8 out, or raise gate.max_token_mult_prob_error, "
            "gate.max_sequence_mult_prob_error or gate.max_masked_fraction"
        )
    return ConsistencyError(
        f"the rollout engine and {disagreement.reference} disagree about the same tokens: "
        f"{measured}",
        expected=expected,
        got=f"{share:.0%} of sequences past {gate.max_token_mult_prob_error}; worst: "
        f"{disagreement.worst()}",
        fix=cause,
    )
