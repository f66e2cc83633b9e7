"""A reward that tells completions of a model apart that has learnt next to nothing."""


def digits(prompt: str, response: str) -> float:
    """The share of a response's characters that are digits."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def out_of_reach(prompt: str, response: str) -> float:
    """A judge that never answers."""
    raise ConnectionError("the judge does not answer")
