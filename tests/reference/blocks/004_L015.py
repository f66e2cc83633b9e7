class PolicyInterface(ABC):
    """Abstract base class defining the interface for RL policies."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool
    ) -> BatchedDataDict["GenerationOutputSpec"]:
        """Generate text responses for the given input data."""
        pass

    @abstractmethod
    def get_logprobs(
        self, data: BatchedDataDict["GenerationDatumSpec"]
    ) -> BatchedDataDict["LogprobsSpec"]:
        """Get log probabilities for the given input data."""
        pass

    @abstractmethod
    def get_reference_logprobs(
        self, data: BatchedDataDict["GenerationDatumSpec"]
    ) -> BatchedDataDict["LogprobsSpec"]:
        """Get reference log probabilities for the given input data."""
        pass

    @abstractmethod
    def train(
        self, 
        data: BatchedDataDict["TrainingDatumSpec"], 
        loss_fn: LossFunction
    ) -> Dict[str, Any]:
        """Train the policy using the given data and loss function."""
        pass
