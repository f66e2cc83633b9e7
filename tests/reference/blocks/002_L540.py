from nemo_rl.backends import get_training_backend, get_generation_backend

training = get_training_backend("dtensor")  # or "megatron"
generation = get_generation_backend("vllm")  # or "megatron"
