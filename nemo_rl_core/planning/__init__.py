"""Plans of memory and speed on GPUs, and of changes that fit, before anything runs."""
