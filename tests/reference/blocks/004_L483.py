# Hugging Face configuration
hf_config = {
    "model_name": "meta-llama/Llama-2-7b-hf",
    "torch_dtype": "bfloat16",
    "device_map": "auto",
    "trust_remote_code": True,
    "load_in_8bit": False,
    "load_in_4bit": False
}

# Megatron configuration
megatron_config = {
    "model_name": "llama3.1-8b",
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "sequence_parallel": True,
    "use_flash_attention": True
}

# VLLM configuration
vllm_config = {
    "model_name": "Qwen/Qwen2.5-1.5B",
    "max_new_tokens": 100,
    "temperature": 0.7,
    "top_p": 1,
    "top_k": None,
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.8,
    "max_model_len": 2048
}
