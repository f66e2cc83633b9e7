class VllmGeneration(GenerationInterface):
    """VLLM-based generation implementation."""
    
    def __init__(self, cluster: RayVirtualCluster, config: GenerationConfig):
        """
        Initialize VLLM generation backend.
        
        Args:
            cluster: Virtual cluster for distributed generation
            config: Generation configuration
        """
        pass
    
    def generate(self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool):
        """Generate text using VLLM backend."""
        pass
    
    def prepare_for_generation(self):
        """Prepare VLLM workers for generation."""
        pass
    
    def finish_generation(self):
        """Clean up VLLM workers after generation."""
        pass
