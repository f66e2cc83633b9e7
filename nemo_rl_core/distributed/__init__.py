"""Clusters, worker groups, batches, and the way of the weights from trainer to engine."""
