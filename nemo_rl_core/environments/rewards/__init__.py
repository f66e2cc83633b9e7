"""What scores: a file each for the kinds of reward, all of them a `Scorer`.

`exact`, `formats` and `multiple_choice` compare text; `math` and `code` compute, each in processes
of their own; `reasoning_gym` calls the task's scorer; `functional_reward` calls a user's function;
`reward_model` and `llm_judge` ask a model; `weighted_sum` adds several.
"""
