"""`nemo-rl doctor`: what this machine has, what it lacks for a run, and what to do about it."""
