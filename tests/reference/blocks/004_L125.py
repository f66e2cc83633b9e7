class HuggingFacePolicy(PolicyInterface):
    """Hugging Face-based policy implementation."""
    
    def __init__(self, model_name: str, **kwargs):
        """
        Initialize Hugging Face policy.
        
        Args:
            model_name: Name or path of the Hugging Face model
            **kwargs: Additional configuration parameters
        """
        pass
    
    def generate(self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool):
        """Generate text using Hugging Face model."""
        pass
    
    def get_logprobs(self, data: BatchedDataDict["GenerationDatumSpec"]):
        """Get log probabilities using Hugging Face model."""
        pass
    
    def train(self, data: BatchedDataDict["TrainingDatumSpec"], loss_fn: LossFunction):
        """Train the Hugging Face model."""
        pass
