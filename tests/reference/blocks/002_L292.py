from nemo_rl.backends import get_training_backend

backend = get_training_backend("custom")
