"""What a recipe takes of its GPUs, computed before anything runs: memory, speed, what would fit."""
