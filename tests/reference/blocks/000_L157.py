from nemo_rl.distributed import RayVirtualCluster, RayWorkerGroup
from nemo_rl.models import HuggingFacePolicy
from nemo_rl.algorithms import DPOTrainer

# Set up distributed environment
cluster = RayVirtualCluster([4])  # 4 GPUs
policy = HuggingFacePolicy("llama2-7b")

# Create trainer
trainer = DPOTrainer(policy, cluster)

# Start training
trainer.train(dataset)
