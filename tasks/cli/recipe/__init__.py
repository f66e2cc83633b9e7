"""Commands that run, plan or preview a recipe."""
