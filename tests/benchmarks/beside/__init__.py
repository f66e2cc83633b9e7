"""How fast the project is beside TRL, plain loops and the limits of the machine; `make bench`."""
