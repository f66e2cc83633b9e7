"""Which of several engines gets a request."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OutstandingRequest:
    """A request that an engine has not answered.

    Attributes:
        engine: Index of the engine.
        prompt_tokens: Of its prompt.
        most_tokens: Of prompt and completion together, at most.
    """

    engine: int
    prompt_tokens: int
    most_tokens: int


class RequestBalance:
    """The outstanding requests of several engines; a new one goes where the fewest tokens are.

    How long a completion will be is not known, so a request counts with the most tokens that it can
    have. Which engine serves a request does not change its tokens: it has a seed of its own.

    Args:
        num_engines: How many.

    Example:
        >>> balance = RequestBalance(2)
        >>> balance.assign([0, 1, 2], prompt_tokens=[4, 4, 4], new_tokens=[96, 16, 16])
        [[0], [1, 2]]
        >>> balance.settle(0).prompt_tokens
        4
        >>> balance.assign([3], prompt_tokens=[4], new_tokens=[16])
        [[0], []]
    """

    def __init__(self, num_engines: int) -> None:
        self._tokens = [0] * num_engines
        self._requests: dict[int, OutstandingRequest] = {}

    @property
    def busy(self) -> list[int]:
        """Engines with outstanding requests."""
        return [engine for engine, tokens in enumerate(self._tokens) if tokens]

    def assign(
        self, names: Sequence[int], *, prompt_tokens: Sequence[int], new_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Gives each request to an engine, in their order.

        Args:
            names: Of the requests, which no outstanding one has.
            prompt_tokens: Of each prompt.
            new_tokens: The most of each completion.

        Returns:
            For each engine the indices of its requests in `names`.
        """
        shares: list[list[int]] = [[] for _ in self._tokens]
        for index, (name, prompt, new) in enumerate(
            zip(names, prompt_tokens, new_tokens, strict=True)
        ):
            engine = min(range(len(self._tokens)), key=self._tokens.__getitem__)
            self._requests[name] = OutstandingRequest(engine, prompt, prompt + new)
            self._tokens[engine] += prompt + new
            shares[engine].append(index)
        return shares

    def settle(self, name: int) -> OutstandingRequest | None:
        """Takes a request off that was answered or cancelled; None if it is not outstanding."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._tokens[request.engine] -= request.most_tokens
        return request
