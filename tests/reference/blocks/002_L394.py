# Registration
@register_training_backend("custom")
class CustomBackend(TrainingBackend):
    pass

# Usage
backend = get_training_backend("custom")
