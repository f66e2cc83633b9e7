"""Maintenance: garbage collection, disk usage and verification of a store; checks of a machine."""
