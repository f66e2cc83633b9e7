"""Post-training of language models: algorithms, backends, data, and what they share."""
