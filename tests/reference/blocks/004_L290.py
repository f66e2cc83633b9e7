from nemo_rl.models.generation import VllmGeneration, VllmConfig
from nemo_rl.distributed import RayVirtualCluster

# Set up configuration
config = VllmConfig(
    model_name="Qwen/Qwen2.5-1.5B",
    max_new_tokens=100,
    temperature=0.7,
    top_p=1,
    top_k=None,
    backend="vllm",
    vllm_cfg={
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.8,
        "max_model_len": 2048,
    }
)

# Initialize cluster and generation backend
cluster = RayVirtualCluster([4])  # 4 GPUs
generator = VllmGeneration(cluster, config)

# Prepare input data
input_data = BatchedDataDict({
    "input_ids": torch.tensor([[1, 2, 3, 4]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1]])
})

# Generate text
generator.prepare_for_generation()
output = generator.generate(input_data, greedy=False)
generator.finish_generation()
