"""Any transformers causal model, on one rank or over FSDP2, tensor and context parallelism."""
