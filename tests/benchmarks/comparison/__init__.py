"""Compares the project with TRL, plain loops and the limits of the machine; `make bench`."""
