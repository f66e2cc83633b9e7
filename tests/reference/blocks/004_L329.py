class HuggingFaceGeneration(GenerationInterface):
    """Hugging Face-based generation implementation."""
    
    def __init__(self, model_name: str, **kwargs):
        """
        Initialize Hugging Face generation backend.
        
        Args:
            model_name: Name or path of the Hugging Face model
            **kwargs: Additional configuration parameters
        """
        pass
    
    def generate(self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool):
        """Generate text using Hugging Face model."""
        pass
    
    def prepare_for_generation(self):
        """Prepare Hugging Face model for generation."""
        pass
    
    def finish_generation(self):
        """Clean up Hugging Face model after generation."""
        pass
