# Test model length respect
def test_max_model_len_respected(model_name: str):
    """Test if model respects max_model_len parameter."""
    pass

# Test generation consistency
def test_generation_consistency(model_name: str):
    """Test consistency between decoding and prefill passes."""
    pass
