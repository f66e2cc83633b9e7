import nemo_rl

result = nemo_rl.train(
    model="Qwen/Qwen2.5-1.5B",
    dataset="nvidia/OpenMathInstruct-2",
    reward_fn=lambda p, r: 1.0 if "correct" in r else 0.0,
)
