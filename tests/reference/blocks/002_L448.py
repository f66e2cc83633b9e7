def my_function(
    param1: str,
    param2: Optional[int] = None,
) -> dict[str, Any]:
    """Short description.

    Longer description if needed.

    Args:
        param1: Description of param1.
        param2: Description of param2.

    Returns:
        Description of return value.

    Raises:
        ValueError: When something is wrong.

    Example:
        >>> result = my_function("test")
    """
    pass
