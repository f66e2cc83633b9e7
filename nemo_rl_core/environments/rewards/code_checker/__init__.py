"""Code that runs in the two sandboxes of a completion's unit tests; standard library only."""
