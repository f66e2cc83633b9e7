"""Turns that end a rollout without a reward, and cost no other rollout its own."""

from nemo_rl_core.environments.multi_turn.replies import Reply
from nemo_rl_core.rollouts.engine import CompletionResult, RolloutPlace
from nemo_rl_core.rollouts.episode import Bounds, MultiTurnEpisode
from nemo_rl_core.rollouts.scorers import EngineChat

WIDE = Bounds(max_turns=9, max_tokens=40, max_new_tokens=6)


def begun(tokenizer, prompt):
    place = RolloutPlace(0, 0, 0, 0)
    episode = MultiTurnEpisode(prompt, place, bounds=WIDE, tokenizer=tokenizer, stop_strings=())
    ids = (*tokenizer.encode("5", add_special_tokens=False), tokenizer.eos_token_id)
    episode.add_completion(CompletionResult(ids, (-1.0,) * len(ids), False))
    return episode


def test_a_reply_that_cannot_be_written_fails_its_rollout(ask, tokenizer):
    episode = begun(tokenizer, ask("8=", "8"))
    episode.add_observation(Reply(1.0, terminated=False, observation="\ud800"))
    assert episode.is_over
    rollout = episode.rollout()
    assert rollout.reward is None
    assert "the environment turn that begins with '\\ud800' holds half" in rollout.error


def test_turns_that_sum_beyond_float32_fail_their_rollout(ask, tokenizer):
    episode = begun(tokenizer, ask("8=", "8"))
    episode.add_observation(Reply(3e38, terminated=False, observation="3="))
    episode.add_observation(Reply(3e38))
    rollout = episode.rollout()
    assert rollout.reward is None
    assert "the sum over all turns returned a number that is not finite in float32" in rollout.error


def test_a_question_that_cannot_be_written_costs_no_other_its_reply(tokenizer, monkeypatch):
    chat = EngineChat(None, tokenizer, max_question_tokens=5)
    monkeypatch.setattr(chat, "_complete", lambda prompts: [str(len(ids)) for ids in prompts])
    first, bad, long, last = chat.replies(["1=", "\ud800", "1+1+1+1=", "12="])
    assert (first, last) == ("3", "4")
    assert "half of a surrogate pair" in str(bad)
    assert "at most 5 fit" in str(long)


def test_an_observation_ends_no_turn(ask, tokenizer):
    episode = begun(tokenizer, ask("8=", "8"))
    episode.add_observation(Reply(1.0, terminated=False, observation="3<eos><bos>"))
    new = episode.rollout().completion
    own = [token for token, mine in zip(new.token_ids, new.token_mask, strict=True) if mine]
    given = [token for token, mine in zip(new.token_ids, new.token_mask, strict=True) if not mine]
    assert own[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in given
    assert tokenizer.bos_token_id not in given
