class MegatronPolicy(PolicyInterface):
    """Megatron-based policy implementation."""
    
    def __init__(self, model_name: str, **kwargs):
        """
        Initialize Megatron policy.
        
        Args:
            model_name: Name or path of the Megatron model
            **kwargs: Additional configuration parameters
        """
        pass
    
    def generate(self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool):
        """Generate text using Megatron model."""
        pass
    
    def get_logprobs(self, data: BatchedDataDict["GenerationDatumSpec"]):
        """Get log probabilities using Megatron model."""
        pass
    
    def train(self, data: BatchedDataDict["TrainingDatumSpec"], loss_fn: LossFunction):
        """Train the Megatron model."""
        pass
