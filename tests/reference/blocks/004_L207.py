from nemo_rl.models import MegatronPolicy

# Initialize policy
policy = MegatronPolicy(
    model_name="llama3.1-8b",
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=4,
    sequence_parallel=True
)

# Generate text
generations = policy.generate(batch, greedy=False)

# Get log probabilities
logprobs = policy.get_logprobs(batch)

# Train the model
loss = policy.train(batch, GRPOLossFn())
