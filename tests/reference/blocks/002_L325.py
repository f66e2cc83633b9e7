def my_reward(prompt: str, response: str) -> float:
    return 1.0 if "correct" in response else 0.0

trainer.fit(dataset=data, reward_fn=my_reward)
