from nemo_rl.trainers.base import BaseTrainer

class MyAlgoTrainer(BaseTrainer):
    """My custom algorithm trainer."""

    @classmethod
    def _build_config_from_pretrained(cls, model, **kwargs):
        config = super()._build_config_from_pretrained(model, **kwargs)
        config["myalgo"] = {
            "my_param": kwargs.pop("my_param", 1.0),
        }
        return config

    def __init__(self, config):
        super().__init__(config)
        self._myalgo_config = config.get("myalgo", {})

    def _train_step(self, batch):
        # Your training logic
        return {"loss": loss_value}

    def _compute_loss(self, batch, outputs):
        # Your loss computation
        return loss_tensor
