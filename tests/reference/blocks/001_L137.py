# Example: Composing a generation pipeline
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.vllm import VllmGeneration, VllmConfig

cluster = RayVirtualCluster(bundle_ct_per_node_list=[4], use_gpus=True, num_gpus_per_node=4)
vllm_cfg: VllmConfig = {
    "backend": "vllm",
    "model_name": "meta-llama/Llama-3.1-8B-Instruct",
    "max_new_tokens": 128,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": None,
    "pad_token_id": 0,
    "stop_token_ids": [],
    "vllm_cfg": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "gpu_memory_utilization": 0.8, "max_model_len": 4096, "skip_tokenizer_init": True, "async_engine": False, "precision": "bfloat16", "load_format": "auto"},
}
generator = VllmGeneration(cluster, vllm_cfg)
