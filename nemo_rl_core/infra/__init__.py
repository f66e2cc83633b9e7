"""Everything around the learning: the store, checkpoints, lineage, logs, clocks and curves."""
