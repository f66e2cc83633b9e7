"""Games over several turns; the rules are in `nemo_rl_core.games`."""

import re
from collections.abc import Sequence
from typing import Any

from nemo_rl_core.environments.interfaces import EnvironmentReturn, Message
from nemo_rl_core.environments.multi_turn.replies import Reply, joined_replies
from nemo_rl_core.environments.rewards.reasoning_gym import candidate_answers
from nemo_rl_core.games import Position

_NUMBER = re.compile(r"[0-9]{1,6}")


class GameEnvironment:
    """Plays a game; stateless between two calls.

    A row's metadata contains `game` (the position's state) and `max_turns`, as the data sets of the
    same name write them. A turn is a move: the full completion, or the text between `<answer>` and
    `</answer>`. The answer is the text of the new position. A win has the reward 1.0 and ends the
    game, as does the last turn. A turn that is not a legal move has the reward `-illegal_penalty`.

    If the token limit leaves no room for another turn, the penalties of all remaining turns are
    subtracted (`truncation_rewards`); otherwise a policy without a legal move would gain by using
    up its tokens.
    """

    def __init__(self, rules: type[Position], *, illegal_penalty: float = 0.0) -> None:
        self._rules = rules
        self._illegal_penalty = illegal_penalty

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Makes the move of the last turn of each of `B` conversations."""
        pairs = zip(message_log_batch, metadata, strict=True)
        return joined_replies([self._reply(log, stored) for log, stored in pairs])

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the unchanged batch and the fraction of games won, from `rewards [B]`."""
        return batch, {"won_fraction": float((batch["rewards"] >= 1).float().mean())}

    def _reply(self, log: Sequence[Message], metadata: Any) -> Reply:
        try:
            position = self._rules.from_state(metadata["game"])
            turns_left = int(metadata["max_turns"]) - 1
        except (KeyError, TypeError, ValueError) as error:
            return Reply(
                error=f"the row has no game of the kind {self._rules.__name__} in its metadata "
                f"({type(error).__name__}: {error}); use the data of the same name"
            )
        move = read_move(log[-1]["content"])
        reached = None if move is None else position.after(move)
        reward = -self._illegal_penalty if reached is None else float(reached.is_won)
        position = reached or position
        if position.is_won or turns_left <= 0:
            return Reply(reward, terminated=True, metadata=metadata)
        next_metadata = {**metadata, "game": position.state, "max_turns": turns_left}
        return Reply(
            reward,
            terminated=False,
            observation=position.text,
            metadata=next_metadata,
            truncation_reward=-self._illegal_penalty * turns_left,
        )


def read_move(text: str) -> int | None:
    """Returns the number in a turn that consists of one number, else None.

    Example:
        >>> read_move(" 7 "), read_move("up or <answer>3</answer>"), read_move("7 or 8")
        (7, 3, None)
    """
    (answer,) = candidate_answers(text, reference="")
    return int(answer) if _NUMBER.fullmatch(answer) else None
