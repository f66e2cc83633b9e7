"""Turns that end their rollout without a reward and do not affect other rollouts."""

from nemo_rl_core.environments.multi_turn.replies import Reply
from nemo_rl_core.models.generation.remote_completions import InProcessEngine
from nemo_rl_core.rollouts.engine import RolloutIndex, joined_requests, results_of
from nemo_rl_core.rollouts.episode import Bounds, MultiTurnEpisode
from nemo_rl_core.rollouts.scorers import EngineChat
from tests.unit.rollouts.conftest import Scripted

WIDE = Bounds(max_turns=9, max_tokens=40, max_new_tokens=6)


def begun(tokenizer, prompt):
    place = RolloutIndex(0, 0, 0, 0)
    episode = MultiTurnEpisode(prompt, place, bounds=WIDE, tokenizer=tokenizer, stop_strings=())
    engine = InProcessEngine(Scripted(tokenizer, lambda request: "5"), tokenizer)
    (result,) = results_of(engine.complete(joined_requests([episode.request()])))
    episode.add_completion(result)
    return episode


def test_an_unwritable_reply_fails_its_rollout(ask, tokenizer):
    episode = begun(tokenizer, ask("8=", "8"))
    episode.add_observation(Reply(1.0, terminated=False, observation="\ud800"))
    assert episode.is_over
    rollout = episode.played()
    assert rollout.reward is None
    assert "the environment turn that begins with '\\ud800' has half" in rollout.error


def test_turns_that_sum_beyond_float32_fail_their_rollout(ask, tokenizer):
    episode = begun(tokenizer, ask("8=", "8"))
    episode.add_observation(Reply(3e38, terminated=False, observation="3="))
    episode.add_observation(Reply(3e38))
    rollout = episode.played()
    assert rollout.reward is None
    assert "the sum over all turns returned a number that is not finite in float32" in rollout.error


def test_an_unwritable_question_does_not_affect_other_replies(tokenizer, monkeypatch):
    chat = EngineChat(None, tokenizer, max_question_tokens=5)
    monkeypatch.setattr(chat, "_complete", lambda prompts: [str(len(ids)) for ids in prompts])
    first, bad, long, last = chat.replies(["1=", "\ud800", "1+1+1+1=", "12="])
    assert (first, last) == ("3", "4")
    assert "half of a surrogate pair" in str(bad)
    assert "at most 5 fit" in str(long)


def test_an_observation_does_not_end_a_turn(ask, tokenizer):
    episode = begun(tokenizer, ask("8=", "8"))
    episode.add_observation(Reply(1.0, terminated=False, observation="3<eos><bos>"))
    request = episode.request()
    assert request.before is not None
    written = request.before.row.reference.block["input_ids"][request.before.row.number].tolist()
    others = request.token_ids
    assert others
    assert written[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in others
    assert tokenizer.bos_token_id not in others
