"""Plans of the GPU memory, GPU-hours and pods of a recipe, and checks against them."""
