"""Ray clusters of stages, each with the size that the recipe asks for."""
