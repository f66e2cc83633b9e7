class VllmGenerationWorker:
    """Ray actor for VLLM generation workers."""
    
    def __init__(self, model_name: str, **kwargs):
        """
        Initialize VLLM generation worker.
        
        Args:
            model_name: Name or path of the model
            **kwargs: Additional VLLM configuration
        """
        pass
    
    def generate(self, input_ids: torch.Tensor, **kwargs):
        """Generate text for the given input tokens."""
        pass
    
    def update_weights(self, weights_handle):
        """Update model weights from IPC handle."""
        pass
