from nemo_rl.models.interfaces import PolicyInterface

class CustomPolicy(PolicyInterface):
    def generate(self, batch):
        # Custom generation logic
        pass
    
    def train(self, batch, loss_fn):
        # Custom training logic
        pass
