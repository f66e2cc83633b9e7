"""Rewards for tests; `digits` differs between completions of a barely trained model."""


def digits(prompt: str, response: str) -> float:
    """Returns the fraction of a response's characters that are digits."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def out_of_reach(prompt: str, response: str) -> float:
    """Fails like a judge that never answers."""
    raise ConnectionError("the judge does not answer")
