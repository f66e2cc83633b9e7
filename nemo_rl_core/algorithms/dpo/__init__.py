"""Direct preference optimisation and its relatives."""
