from nemo_rl import GRPOTrainer

trainer = GRPOTrainer.from_pretrained(
    "Qwen/Qwen2.5-1.5B",
    num_prompts_per_step=32,
)
trainer.fit(dataset="my-dataset", reward_fn=my_reward)
