class GenerationInterface(ABC):
    """Abstract base class defining the interface for RL policies."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool
    ) -> BatchedDataDict["GenerationOutputSpec"]:
        """Generate text responses for the given input data."""
        pass

    @abstractmethod
    def prepare_for_generation(self, *args, **kwargs):
        """Prepare the generation backend for text generation."""
        pass

    @abstractmethod
    def finish_generation(self, *args, **kwargs):
        """Clean up after text generation."""
        pass
