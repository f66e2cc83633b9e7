"""Maintenance: what may go from a store, what is damaged in it, and what the machine lacks."""
