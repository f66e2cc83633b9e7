"""Any transformers causal model, trained with torch alone; one rank so far."""
