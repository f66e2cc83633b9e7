from nemo_rl.models.validation import validate_log_probability_consistency

# Validate consistency
is_consistent = validate_log_probability_consistency(
    training_backend=policy,
    inference_backend=generator,
    test_data=validation_batch,
    threshold=1.05
)

if not is_consistent:
    print("Warning: Log probability consistency issues detected")
