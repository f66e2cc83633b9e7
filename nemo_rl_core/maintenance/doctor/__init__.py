"""`nemo-rl doctor`: checks whether this machine is ready for runs, with a fix for each problem."""
