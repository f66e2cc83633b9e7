def validate_log_probability_consistency(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict,
    threshold: float = 1.05
) -> bool:
    """
    Validate log probability consistency between training and inference backends.
    
    Args:
        training_backend: Training backend (e.g., Hugging Face)
        inference_backend: Inference backend (e.g., VLLM)
        test_data: Test data for validation
        threshold: Acceptable error threshold (default: 1.05)
    
    Returns:
        True if consistency is within threshold, False otherwise
    """
    pass
