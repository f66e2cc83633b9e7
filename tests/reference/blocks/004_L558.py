from nemo_rl.models import HuggingFacePolicy
from nemo_rl.models.generation import VllmGeneration
from nemo_rl.algorithms import DPOLossFn

# Initialize components
policy = HuggingFacePolicy("meta-llama/Llama-2-7b-hf")
generator = VllmGeneration(cluster, vllm_config)

# Training loop
for batch in dataloader:
    # Generate responses
    generations = generator.generate(batch, greedy=False)
    
    # Get log probabilities
    logprobs = policy.get_logprobs(generations)
    ref_logprobs = policy.get_reference_logprobs(generations)
    
    # Train policy
    loss = policy.train(batch, DPOLossFn())
