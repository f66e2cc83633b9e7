"""Commands that account for, verify and clean up the store."""
