"""Commands that show recorded runs, and repeat them."""
