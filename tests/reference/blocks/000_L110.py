# Example: Composing a training pipeline
policy = HuggingFacePolicy(model_name="llama2-7b")
generator = VllmGeneration(cluster, config)
environment = MathEnvironment()
dataloader = BatchedDataLoader(dataset)

# All components work together through interfaces
for batch in dataloader:
    generations = generator.generate(batch)
    rewards = environment.step(generations)
    policy.train(generations, rewards)
