"""What a run reports: events, its log, metrics, costs, and the trackers that take them away."""
