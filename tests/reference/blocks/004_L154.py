from nemo_rl.models import HuggingFacePolicy

# Initialize policy
policy = HuggingFacePolicy(
    model_name="meta-llama/Llama-2-7b-hf",
    torch_dtype="bfloat16",
    device_map="auto"
)

# Generate text
generations = policy.generate(batch, greedy=False)

# Get log probabilities
logprobs = policy.get_logprobs(batch)

# Train the model
loss = policy.train(batch, DPOLossFn())
