"""What answers to completions, and what they are worth.

Four words, each with one meaning:

- A **reward** is a number: what a rollout, or one turn of it, is worth. `Rollout.reward` holds it,
  and learning raises it. Users write one as a function, `(prompt, response) -> float`.
- A **scorer** (`interfaces.Scorer`) gives finished completions their rewards, one each, and says
  nothing to the policy: exact, math, code, regex, a reward model, your function.
- An **environment** (`interfaces.EnvironmentInterface`) hears the policy's turns one by one,
  rewards each, and answers, so that the policy may go on: games and tools. The section
  `environment` of a recipe names either; `adapt` turns one into the other, a scorer being an
  environment that ends after one turn.
- A **judge** is a language model that is asked for a mark (`llm_judge`), nothing else.

A rollout is **scored** when its reward has been computed, **valid** when nothing failed, and
**graded** when its answer has been compared with the one held out (`correct`).

`factory` makes all of them from their configs.
"""
