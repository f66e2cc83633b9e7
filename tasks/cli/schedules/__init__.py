"""`nemo-rl schedule`, and the launch plans that it registers."""
