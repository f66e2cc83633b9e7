"""Pure tensor functions: masks, logprobs, divergences, advantages, importance ratios."""
