"""A reward model by its hub name or folder: what it must be, and its weights.

It asks transformers itself: environments lie beside `data` and below the training backends.
"""

import math
from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.hub import hub_access
from nemo_rl_core.checkpoints.weight_files import unreadable
from nemo_rl_core.checkpoints.weights import load_pretrained
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.errors import ModelError
from nemo_rl_core.planning.model_parts import longest_sequence

SCALAR_HEAD = "score"
"""What transformers calls the head of a decoder that classifies sequences."""


def load_reward_model(name: str) -> Any:
    """The model in evaluation mode, in the type of its checkpoint, with a float32 head.

    Raises:
        ModelError: If it cannot be read, has no scalar head, or weights that are missing, surplus,
            misshapen or not finite.
    """
    from transformers import AutoModelForSequenceClassification

    called = f"the reward model {name!r}"
    with hub_access(name):
        model, _ = load_pretrained(
            AutoModelForSequenceClassification, name, called=called, dtype="auto"
        )
    if not hasattr(model, SCALAR_HEAD):
        raise ModelError(
            f"{called} has no scores to give",
            expected=f"a decoder with a head called {SCALAR_HEAD!r}",
            got=type(model).__name__,
            fix="name a checkpoint that RewardModelTrainer has saved",
        )
    getattr(model, SCALAR_HEAD).float()
    return model.eval().to(local_device())


def checked_context_length(name: str) -> float:
    """How many tokens a reward model was made for; infinite where its config does not say.

    Raises:
        ModelError: If it cannot be read, or is no classifier of one label.
    """
    from transformers import AutoConfig

    try:
        with hub_access(name):
            config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise unreadable(f"the reward model {name!r}", error) from error
    architecture = (config.architectures or ["no architecture"])[0]
    if not architecture.endswith("ForSequenceClassification") or config.num_labels != 1:
        raise ModelError(
            f"{name!r} is no reward model",
            expected="a transformers sequence classifier with one label",
            got=f"{architecture} with {config.num_labels} labels",
            fix="name a checkpoint that RewardModelTrainer has saved",
        )
    return float(longest_sequence(config) or math.inf)


def refuse_other_vocabulary(name: str, policy: Path) -> None:
    """Compares the ids of all tokens; heads may have more rows than there are tokens.

    Raises:
        ModelError: If any token has another id, or is missing in one of them.
    """
    ours, theirs = _vocabulary(str(policy)), _vocabulary(name)
    if ours != theirs:
        differing = sorted({token for token, _ in ours.items() ^ theirs.items()})
        raise ModelError(
            f"the reward model {name!r} has another vocabulary than the policy {policy.name!r}",
            expected=f"the same ids for the same {len(ours)} tokens",
            got=f"{len(theirs)} tokens; {len(differing)} differ, such as {differing[:3]}",
            fix="train the reward model from a model with the policy's tokenizer",
        )


def _vocabulary(name: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    try:
        with hub_access(name):
            vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(name).get_vocab()
    except (OSError, ValueError, KeyError) as error:
        raise unreadable(f"the reward model {name!r}", error) from error
    return vocabulary
