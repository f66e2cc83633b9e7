"""Commands that check this machine or a cluster."""
