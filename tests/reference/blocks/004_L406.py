from nemo_rl.models.interfaces import PolicyInterface
from nemo_rl.distributed import BatchedDataDict

class CustomPolicy(PolicyInterface):
    """Custom policy implementation."""
    
    def __init__(self, model_path: str):
        """Initialize custom policy."""
        self.model = load_custom_model(model_path)
    
    def generate(self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool):
        """Generate text using custom model."""
        input_ids = data["input_ids"]
        outputs = self.model.generate(
            input_ids,
            max_new_tokens=data.get("max_new_tokens", 100),
            do_sample=not greedy,
            temperature=data.get("temperature", 0.7)
        )
        return BatchedDataDict({
            "output_ids": outputs,
            "generation_lengths": torch.tensor([len(o) - len(i) for o, i in zip(outputs, input_ids)]),
            "unpadded_sequence_lengths": torch.tensor([len(o) for o in outputs])
        })
    
    def get_logprobs(self, data: BatchedDataDict["GenerationDatumSpec"]):
        """Get log probabilities using custom model."""
        input_ids = data["input_ids"]
        with torch.no_grad():
            outputs = self.model(input_ids)
            logprobs = torch.log_softmax(outputs.logits, dim=-1)
        return BatchedDataDict({"logprobs": logprobs})
    
    def train(self, data: BatchedDataDict["TrainingDatumSpec"], loss_fn: LossFunction):
        """Train the custom model."""
        # Custom training logic
        loss = loss_fn(self.model, data)
        return {"loss": loss.item()}
