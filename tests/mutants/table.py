"""Textual faults of the product's code, each with the fast tests that must notice it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault.

    Attributes:
        file: Path of the source file in the repository.
        old: Text that the fault replaces; it must occur exactly once.
        new: The replacement.
        tests: Paths or ids of tests, as pytest takes them; the quickest come first.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_ALGORITHMS = "nemo_rl_core/algorithms"
_FUNCTIONAL = "nemo_rl_core/functional"
_REMOTE = "algorithms/grpo/test_remote_training.py"
_PACKING = "nemo_rl_core/distributed/packing"


def _mutants(file: str, tests: list[str], *changes: tuple[str, str]) -> list[Mutant]:
    return [
        Mutant(file, old, new, tuple(f"tests/unit/{each}" for each in tests))
        for old, new in changes
    ]


MUTANTS: list[Mutant] = [
    # Losses.
    *_mutants(
        f"{_FUNCTIONAL}/policy_gradient.py",
        [
            "functional/test_policy_gradient.py",
            "functional/test_importance.py",
            "algorithms/grpo/test_grpo_loss_kinds.py",
        ],
        ("torch.exp(current - previous)", "torch.exp(previous - current)"),
        ("ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)"),
        ("torch.maximum(-advantages * ratio", "torch.minimum(-advantages * ratio"),
        ("torch.where(advantages < 0, torch.min", "torch.where(advantages > 0, torch.min"),
        ("ratio.detach().clamp(", "ratio.clamp("),
        ("advantages > 0, torch.full_like", "advantages < 0, torch.full_like"),
        ("(ratio - 1)) * 4 / tau", "(ratio - 1)) * 2 / tau"),
        ("-score_function_weight(current) * current", "-current"),
        ("(trainer_logprobs - generation_logprobs).detach()", "(trainer_logprobs * 0).detach()"),
        ("nan=0.0, posinf=0.0", "nan=0.0, posinf=1.0"),
        ("weight.clamp(max=cap)", "weight"),
        ("(weight >= low) & (weight <= high)", "(weight >= low) | (weight <= high)"),
        (
            "(sequence_weight >= low) & (sequence_weight <= high)",
            "(weight >= low) & (weight <= high)",
        ),
        ("masked_sequence_mean(current - previous, mask)", "(current - previous).sum(-1)"),
    ),
    *_mutants(
        f"{_FUNCTIONAL}/kl.py",
        ["functional/test_kl.py"],
        ("torch.expm1(log_ratio) - log_ratio", "torch.expm1(log_ratio) + log_ratio"),
        ("log_ratio.square() / 2", "log_ratio.square()"),
        ("estimate = -log_ratio", "estimate = log_ratio"),
        ("(fixed - reference).clamp", "(reference - fixed).clamp"),
        (
            "(fixed - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)",
            "(fixed - reference).clamp(-MAX_ESTIMATE, MAX_ESTIMATE)",
        ),
        ("estimate.clamp(-MAX_ESTIMATE, MAX_ESTIMATE)", "estimate"),
    ),
    *_mutants(
        f"{_FUNCTIONAL}/masked.py",
        ["functional/test_masked.py"],
        ("denominator.clamp(min=1)", "denominator"),
        ("& sample_mask.bool()", "| sample_mask.bool()"),
        ("mask.sum(dim=-1).clamp(min=1)", "mask.shape[-1]"),
    ),
    *_mutants(
        f"{_ALGORITHMS}/grpo/loss.py",
        [
            "algorithms/grpo/test_grpo_loss_kinds.py",
            "algorithms/grpo/test_expected_gradients.py",
            "algorithms/grpo/test_grpo_loss.py",
        ],
        ("weight * ratio.detach() if", "weight if"),
        ("weight * ratio.detach() if", "ratio.detach() if"),
        ("weight * ratio.detach() if", "weight * ratio if"),
        ("values = weight * _policy_loss", "values = _policy_loss"),
        ("denominator=num_sequences)\n        case", "denominator=num_tokens)\n        case"),
        ("num_sequences * max_tokens", "num_tokens * max_tokens"),
        ("on_policy * (config.kl.beta * penalty)", "on_policy * penalty"),
        ("values - on_policy * (config.entropy", "values + on_policy * (config.entropy"),
        ("low & (advantages < 0)", "low & (advantages > 0)"),
        ("self.prev_is_current or isinstance", "self.prev_is_current and isinstance"),
    ),
    *_mutants(
        f"{_ALGORITHMS}/dpo/loss.py",
        ["algorithms/dpo/test_dpo_loss.py"],
        (
            "sequences.rewards[chosen] - sequences.rewards[rejected]\n    # C",
            "sequences.rewards[rejected] - sequences.rewards[chosen]\n    # C",
        ),
        ("global_valid_seqs / 2)", "global_valid_seqs)"),
        ("config.beta * baseline", "baseline"),
        ("margins / config.beta, beta", "margins, beta"),
        ("margins - config.gamma", "margins + config.gamma"),
    ),
    *_mutants(
        f"{_FUNCTIONAL}/preference.py",
        ["functional/test_preference.py"],
        ("1 / (2 * beta)", "1 / beta"),
        ("/ (1 - 2 * label_smoothing)", "/ (1 - label_smoothing)"),
        ("F.relu(1 - margins)", "F.relu(-margins)"),
        ("mean.clamp(min=0)", "mean"),
    ),
    *_mutants(
        f"{_ALGORITHMS}/dpo/data.py",
        ["algorithms/dpo/test_dpo_data.py"],
        ("pairs[(index + 1) % len(pairs)]", "pairs[index]"),
        ("example.loss_mask[prompt_length:]", "example.loss_mask[start:]"),
    ),
    # Advantages.
    *_mutants(
        f"{_FUNCTIONAL}/advantages.py",
        ["functional/test_advantages.py"],
        ("squares / (groups.sizes - 1).clamp(min=1)", "squares / groups.sizes"),
        ("torch.where(measured.is_constant, 0.0, groups.centered)", "groups.centered"),
        (
            "groups.centered * groups.sizes / (groups",
            "groups.centered * (groups.sizes - 1) / (groups",
        ),
        ("(squares + counts * (means - mean).square()).sum()", "squares.sum()"),
        ("max(moments.count - 1, 1)", "moments.count"),
        ("total + weight * group_normalized", "total + group_normalized"),
        ("torch.unique_consecutive if is_sorted else torch.unique", "torch.unique_consecutive"),
        ("shares = 1 / groups.sizes", "shares = torch.ones_like(groups.sizes)"),
        ("measured = _Groups.of(outcomes, group_ids)", "pass"),
    ),
    *_mutants(
        f"{_FUNCTIONAL}/rewards.py",
        ["functional/test_rewards.py"],
        (".clamp(-penalty, 0)", ".clamp(max=0)"),
        ("mask.flip(-1).cumsum(-1).flip(-1)", "mask.cumsum(-1)"),
        ("return zero_masked(sums, mask)", "return sums"),
    ),
    *_mutants(
        f"{_FUNCTIONAL}/value.py",
        ["functional/test_value.py", "functional/test_advantages.py"],
        ("torch.where(is_valid, values[:, t], next_value)", "values[:, t]"),
        ("gamma * lam * next_advantage", "lam * next_advantage"),
        ("0.5 * torch.maximum((values", "0.5 * torch.minimum((values"),
        ("return 1 - unexplained / variance", "return 1 - variance / unexplained"),
    ),
    *_mutants(
        f"{_ALGORITHMS}/grpo/data.py",
        ["algorithms/grpo/test_grpo_data.py"],
        (
            'token_mask = batch["token_mask"].bool()',
            'token_mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])',
        ),
        ('rewards - episodes["kl_penalties"]', 'rewards + episodes["kl_penalties"]'),
        ('mask * ~episodes["truncated"][index]', "mask"),
        ("rewards + overlong_penalty(", "rewards - overlong_penalty("),
        ('rewards = group_centered(rewards, episodes["group_ids"])', "pass"),
        (
            "group_normalized(rewards, group_ids, outcomes=outcomes)",
            "group_normalized(rewards, group_ids)",
        ),
        (
            'batch["group_ids"] = groups_of(rollouts)',
            'batch["group_ids"] = groups_of(rollouts) * 0',
        ),
    ),
    *_mutants(
        f"{_ALGORITHMS}/ppo/data.py",
        ["algorithms/ppo/test_ppo_data.py"],
        ('(batch["input_lengths"] - 1)', '(batch["input_lengths"] - 2)'),
        ('zero_masked(batch["last_values"], batch["truncated"])', 'batch["last_values"]'),
        ("rewards - config.kl.beta", "rewards + config.kl.beta"),
    ),
    # Rollouts.
    *_mutants(
        f"{_ALGORITHMS}/grpo/trainer.py",
        [f"{_REMOTE}::test_inconsistent_sequences_are_not_trained_on"],
        ('if consistency["num_inconsistent_sequences"]:', "if False:"),
    ),
    *_mutants(
        f"{_ALGORITHMS}/grpo/trainer.py",
        [
            f"{_REMOTE}::test_remote_rollouts_train_bitwise_identically[sequences that are off, "
            "truncated ones left out]"
        ],
        ('BatchedDataDict({**data, "sample_mask": compared})', "BatchedDataDict(data)"),
    ),
    *_mutants(
        "nemo_rl_core/rollouts/engine.py",
        ["rollouts/test_engine.py", "rollouts/test_multi_turn.py"],
        ('(f"/{turn}" if turn else "")', '""'),
        ("return first + sample", "return first"),
    ),
    *_mutants(
        "nemo_rl_core/rollouts/remote_rollouts.py",
        ["rollouts/test_remote_rollouts.py", "rollouts/test_remote_turns.py"],
        ("part.prompt + prompts", "part.prompt"),
        ("part.completion + completions", "part.completion"),
        ("(row + rows, each)", "(row, each)"),
        ('0 if name == "input_ids" else 1', "0"),
        ("rewards[rows] = scored.rewards", "rewards[: len(rows)] = scored.rewards"),
    ),
    *_mutants(
        "nemo_rl_core/rollouts/batch.py",
        [
            "rollouts/test_batch.py",
            "algorithms/grpo/test_grpo_data.py",
            "rollouts/test_remote_rollouts.py",
        ],
        ('batch["rollout_lengths"] += torch.tensor(num_unread)', "pass"),
        (
            'batch["sample_mask"].bool(), advantages, 0.0',
            'batch["sample_mask"].bool() | True, advantages, 0.0',
        ),
    ),
    *_mutants(
        "nemo_rl_core/models/generation/remote_completions.py",
        ["rollouts/test_batch.py", "algorithms/grpo/test_grpo_data.py"],
        ("flat_tensor(values, kind)[written]", "flat_tensor(values, kind)[: int(mask.sum())]"),
    ),
    *_mutants(
        f"{_ALGORITHMS}/grpo/dynamic_sampling.py",
        ["algorithms/grpo/test_dynamic_sampling.py"],
        ("len(self._groups()) < self._num_prompts", "len(self._groups()) <= self._num_prompts"),
        ("self._groups()[: self._num_prompts]", "self._groups()"),
        ("torch.stack(masks).any(dim=0)", "torch.stack(masks).all(dim=0)"),
    ),
    *_mutants(
        "nemo_rl_core/models/validation/gate.py",
        ["models/test_gate.py"],
        (" | per_sequence.isinf()", ""),
        ("kept = mask & ~is_off[:, None]", "kept = mask"),
        ("share > gate.max_masked_fraction", "share >= gate.max_masked_fraction"),
        ("mask = mask & (age == 0)", "pass"),
    ),
    # Packing.
    *_mutants(
        f"{_PACKING}/plan.py",
        [
            "distributed/test_packing_layout.py",
            "distributed/test_packing_plan.py",
            "distributed/test_packing_prefixes.py",
        ],
        (
            "max_rows = max_tokens // row_length\n    rows = [[first]]",
            "max_rows = max_tokens // row_length + 1\n    rows = [[first]]",
        ),
        ("(room - length, row)", "(room, row)"),
        (
            "torch.arange(row_length, device=device) - used[:, None]",
            "torch.arange(row_length, device=device) - 0 * used[:, None]",
        ),
        ("starts[end] - 1 - row_start", "starts[end] - row_start"),
        ("starts[owner] - shared[owner] + positions", "starts[owner] + positions"),
    ),
    *_mutants(
        f"{_PACKING}/prefixes.py",
        ["distributed/test_packing_prefixes.py"],
        ("pairs_per_token * overlap", "pairs_per_token"),
        ("torch.where(ordered[1:] == ordered[:-1], first, 0)", "first"),
        (
            "torch.where(differs.any(1), differs.int().argmax(1), ids.shape[1])",
            "differs.int().argmax(1)",
        ),
    ),
    *_mutants(
        f"{_PACKING}/ranks.py",
        ["distributed/test_sharding.py", "distributed/test_packing_prefixes.py"],
        (".reorder_data(self.order)", ""),
        ("min(options, key=_step_cost)", "max(options, key=_step_cost)"),
    ),
    *_mutants(
        f"{_PACKING}/row_shards.py",
        ["distributed/test_packing_row_shards.py"],
        ("np.where(turn % 2, num_shares - 1 - position, position)", "position"),
        ("(total + cost, share)", "(total, share)"),
    ),
    # Promotion.
    *_mutants(
        "tasks/promote.py",
        ["evals/test_recipe.py"],
        ("compared.low > config.", "compared.difference > config."),
    ),
    *_mutants(
        "nemo_rl_core/evals/comparison.py",
        ["evals/test_comparison.py"],
        ("sum(b and not a for", "sum(b for"),
        ("if self.low > 0:", "if self.difference > 0:"),
        ("(num_pairs + z_power**2)", "num_pairs"),
        ("before[key] is not None and after[key] is not None", "before[key] is not None"),
    ),
    *_mutants(
        "nemo_rl_core/evals/statistics.py",
        ["evals/test_statistics.py"],
        ("proportion + z**2 / (2 * size)", "proportion"),
        ("(1 + _checked_confidence(confidence)) / 2", "_checked_confidence(confidence)"),
    ),
]
