"""Training from Python: the arguments of trainers, `fit`, and the record of its run."""
