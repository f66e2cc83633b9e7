# User provides simple function
def reward(p: str, r: str) -> float:
    return 1.0

# Adapter makes it work with trainer
wrapper = FunctionalRewardWrapper(reward)
# wrapper implements EnvironmentInterface
