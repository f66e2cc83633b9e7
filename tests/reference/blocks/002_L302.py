from nemo_rl.backends.generation.base import GenerationBackend, register_generation_backend

@register_generation_backend("custom")
class CustomGenerationBackend(GenerationBackend):

    def setup(self, config):
        pass

    def generate(self, prompts, sampling_params):
        return responses

    def update_weights(self, state_dict):
        pass

    def shutdown(self):
        pass
