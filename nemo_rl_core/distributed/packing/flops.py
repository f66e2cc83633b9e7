"""What a sequence costs to train on: linear in its length, and quadratic through attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that its cost depends on.

    Attributes:
        hidden_size: `D`, the width of the residual stream.
        num_layers: How many decoder layers.
        intermediate_size: Width of the feed-forward; of a mixture, of the experts one token sees.
        vocab_size: `V`, logits a token.
        attention_size: Query heads times head size.
        key_value_size: Key (and value) heads times head size.
    """

    hidden_size: int
    num_layers: int
    intermediate_size: int
    vocab_size: int
    attention_size: int
    key_value_size: int


TYPICAL_SHAPE = ModelShape(
    hidden_size=2048,
    num_layers=32,
    intermediate_size=8192,
    vocab_size=128_000,
    attention_size=2048,
    key_value_size=512,
)
"""A model of about 2 billion parameters, where the caller does not say which it is.

Only the ratio of the two terms matters for balance: here they are equal at 33,696 tokens.
"""


def sequence_flops(length: int, shape: ModelShape = TYPICAL_SHAPE) -> int:
    """Floating-point operations of one training step on one sequence, forward and backward.

    A matrix product takes two operations a weight and token. A layer's weights are queries and
    output (`D * A` each), keys and values (`D * K` each) and a gated feed-forward (`3 * D * F`);
    the head has `D * V`. Causal attention multiplies `T * T / 2` pairs by `A`, once for scores and
    once for values. The backward pass takes twice the forward pass. Norms, activations and the
    embedding are left out.

    `3 * (2 * T * (L * (2*D*A + 2*D*K + 3*D*F) + D*V) + L * 2 * A * T**2)`

    This is three times equation 2.2 of Kaplan et al. (2020), arXiv:2001.08361, for a sequence in
    place of a token, with the head, which they leave out.

    Args:
        length: `T`, tokens of the sequence.
        shape: The model's sizes.

    Returns:
        A whole number, so that sums of costs are exact and plans deterministic.

    Example:
        >>> tiny = ModelShape(2, 1, 4, 8, 2, 1)
        >>> sequence_flops(1, tiny), sequence_flops(2, tiny)
        (324, 672)
    """
    layer = shape.hidden_size * (
        2 * shape.attention_size + 2 * shape.key_value_size + 3 * shape.intermediate_size
    )
    weights = shape.num_layers * layer + shape.hidden_size * shape.vocab_size
    attention = shape.num_layers * 2 * shape.attention_size * length**2
    return 3 * (2 * length * weights + attention)
