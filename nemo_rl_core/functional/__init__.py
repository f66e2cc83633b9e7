"""Pure tensor math: masks, logprobs, divergences, advantages, health of importance ratios."""
