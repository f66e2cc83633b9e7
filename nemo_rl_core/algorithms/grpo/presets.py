"""Published algorithms of the GRPO family by name, as fields of `GRPOConfig`.

Step sizes and learning rates depend on model and machine and are left out, unless they define the
algorithm. All values are explicit, defaults included, for comparison with the papers. In a recipe:
`grpo: {preset: dapo}`.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl_core.config.names import unknown_names

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4. The clip range is not published;
    # 0.2 is PPO's. The penalty's gradient is -d per token, where equation 20 has 1 - e^d: see
    # `functional.kl.kl_penalty`.
    "grpo": {
        "advantage": {"kind": "group_normalized"},
        "loss": {
            "kind": "clipped",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": "sequence_mean",
            "kl": {"kind": "k3", "beta": 0.04, "place": "in_loss"},
        },
    },
    # Yu et al. 2025, arXiv:2503.14476, sections 3 and 4.1: 4096 of 20480 tokens are the buffer. The
    # paper samples without a bound.
    "dapo": {
        "advantage": {"kind": "group_normalized"},
        "loss": {
            "kind": "clipped",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "reduction": "token_mean",
            "kl": None,
        },
        "overlong": {"kind": "penalty", "buffer_tokens": 4096, "penalty": 1.0},
        "dynamic_sampling": {"max_draws": 10},
    },
    # Liu et al. 2025, arXiv:2503.20783, section 3.2: no division by length or std; max_tokens is
    # the budget of a completion.
    "dr_grpo": {
        "advantage": {"kind": "group_centered"},
        "loss": {
            "kind": "clipped",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": {"kind": "constant", "max_tokens": 3000},
            "kl": None,
        },
    },
    # Zheng et al. 2025, arXiv:2507.18071, sections 4.1 and 5.1.
    "gspo": {
        "advantage": {"kind": "group_normalized"},
        "loss": {
            "kind": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "reduction": "sequence_mean",
            "kl": None,
        },
    },
    # MiniMax-M1, arXiv:2506.13585, section 3.1: no lower bound. The upper bound is not published; 5
    # is in the range that ScaleRL found equivalent, arXiv:2510.13786.
    "cispo": {
        "advantage": {"kind": "group_normalized"},
        "loss": {
            "kind": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "reduction": "token_mean",
            "kl": None,
        },
    },
    # Ahmadian et al. 2024, arXiv:2402.14740, section 3: a completion is one action, so token
    # logprobs are summed (a constant denominator of 1), and KL is in the reward.
    "rloo": {
        "num_generations_per_prompt": 4,
        "advantage": {"kind": "leave_one_out"},
        "loss": {
            "kind": "reinforce",
            "reduction": {"kind": "constant", "max_tokens": 1},
            "kl": {"kind": "k1", "beta": 0.03, "place": "in_reward"},
        },
    },
    # Hu et al. 2025, arXiv:2501.03262, section 3: one completion per prompt, KL per token in the
    # reward.
    "reinforce_plus_plus": {
        "num_generations_per_prompt": 1,
        "advantage": {"kind": "reinforce_plus_plus"},
        "loss": {
            "kind": "clipped",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": "token_mean",
            "kl": {"kind": "k1", "beta": 0.01, "place": "in_reward"},
        },
    },
    # Gao et al. 2025, arXiv:2511.20347, section 3.
    "sapo": {
        "advantage": {"kind": "group_normalized"},
        "loss": {
            "kind": "sapo",
            "tau_positive": 1.0,
            "tau_negative": 1.05,
            "reduction": "sequence_mean",
            "kl": None,
        },
    },
    # GDPO, arXiv:2601.05242, section 3: two rewards of equal weight, as for answer and format.
    "gdpo": {
        "advantage": {"kind": "gdpo", "weights": [1.0, 1.0]},
        "loss": {
            "kind": "clipped",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reduction": "sequence_mean",
            "kl": None,
        },
    },
}


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the preset `values["preset"]`, overridden by the other values.

    A map overrides single fields of the preset's map, or replaces the map if it selects a different
    variant (by `place` if there is one, else by `kind`). None means no preset, so that a recipe can
    remove the preset of its base recipe.

    Example:
        >>> with_preset({"preset": "dr_grpo", "loss": {"clip_high": 0.3}})["loss"]["clip_low"]
        0.2
    """
    changes = {key: value for key, value in values.items() if key != "preset"}
    name = values.get("preset")
    if name is None:
        return changes
    if name not in list(PRESETS):  # a list, since the name may not be hashable
        raise unknown_names(
            "there is no preset",
            [str(name)],
            list(PRESETS),
            otherwise="choose one, or leave preset out",
        )
    return _changed(PRESETS[name], changes)


def _changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    changed = {**base, **changes}
    for key, new in changes.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            tag = "place" if "place" in old else "kind"
            same_variant = new.get(tag, old.get(tag)) == old.get(tag)
            changed[key] = _changed(old, new) if same_variant else new
    return changed
