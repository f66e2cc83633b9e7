from nemo_rl.models.generation.interfaces import GenerationInterface

class CustomGeneration(GenerationInterface):
    """Custom generation backend implementation."""
    
    def __init__(self, model_name: str, **kwargs):
        """Initialize custom generation backend."""
        self.model = load_custom_model(model_name)
    
    def generate(self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool):
        """Generate text using custom backend."""
        # Custom generation logic
        pass
    
    def prepare_for_generation(self):
        """Prepare custom backend for generation."""
        # Custom preparation logic
        pass
    
    def finish_generation(self):
        """Clean up custom backend after generation."""
        # Custom cleanup logic
        pass
