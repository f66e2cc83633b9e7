# Same interface, different backends
policy_hf = HuggingFacePolicy(model_name="llama2-7b")
policy_megatron = MegatronPolicy(model_name="llama2-7b")

# Both implement the same PolicyInterface
generations = policy_hf.generate(batch)  # Same API
generations = policy_megatron.generate(batch)  # Same API
