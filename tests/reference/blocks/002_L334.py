from nemo_rl.environments import FunctionalRewardWrapper

def batch_reward(prompts: list[str], responses: list[str]) -> list[float]:
    return [score(p, r) for p, r in zip(prompts, responses)]

env = FunctionalRewardWrapper(batch_reward, name="batch_scorer")
