"""Keeping the store in order: what may go, what is damaged, and what takes the room."""
