class GenerationDatumSpec(TypedDict):
    """Input data specification for generation."""
    input_ids: torch.Tensor         # Input token IDs
    attention_mask: torch.Tensor    # Attention mask
    __extra__: Any                  # Additional data specific to the backend
