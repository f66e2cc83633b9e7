from nemo_rl.backends.training.base import TrainingBackend, register_training_backend

@register_training_backend("custom")
class CustomTrainingBackend(TrainingBackend):
    """Custom training backend."""

    def setup(self, config):
        # Initialize backend
        pass

    def train_step(self, batch, loss_fn):
        # Execute training step
        return {"loss": loss_value}

    def get_logprobs(self, batch):
        # Compute log probabilities
        return logprobs

    def save_checkpoint(self, path):
        # Save model state
        pass

    def load_checkpoint(self, path):
        # Load model state
        pass

    def shutdown(self):
        # Clean up resources
        pass
