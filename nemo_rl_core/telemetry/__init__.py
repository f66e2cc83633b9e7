"""Reporting of a run: events, log, metrics, costs and trackers."""
