"""Local paths from names in external data, which may be hostile: `../x`, `/etc/x`, or a link.

`tests/unit/store/test_joined_paths.py` finds joins that skip `resolve_below`.
"""

from pathlib import Path

from nemo_rl_core.errors import UnsafePathError

_MAX_PART_BYTES = 200
"""Longest part of a name. File systems allow 255, and unfinished files have longer names."""
_MAX_BYTES = 1024


def resolve_below(root: Path, name: str, *, source: str, may_link: bool = False) -> Path:
    """Returns the path of a name below a folder.

    Args:
        source: Origin of the name, for the error, such as "the listing of s3://bucket/m".
        may_link: Whether the last part may be a link that leads out of the folder, as in the caches
            of the Hugging Face hub and of a node.

    Raises:
        UnsafePathError: If the name is empty, absolute, longer than 1024 bytes, has a part that is
            empty, `.`, `..` or longer than 200 bytes, has a backslash or an unprintable character,
            or leads out of the folder through a link.

    Example:
        >>> resolve_below(Path("/store"), "runs/one/run.log", source="history.db")
        PosixPath('/store/runs/one/run.log')
    """
    path = root / checked_name(name, source=source)
    try:
        is_inside = (path.parent if may_link else path).resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a loop of links
        is_inside = False
    if not is_inside:
        raise UnsafePathError(
            f"{source} names a file outside of its folder",
            expected=f"a path below {root}",
            got=f"{name!r}, which leads out through a link",
            fix="remove the link",
        )
    return path


def checked_name(name: str, *, source: str) -> str:
    """Returns a name if it is safe below a folder without links; errors as in `resolve_below`."""
    parts = name.split("/")
    is_plain = (
        name.isprintable()  # False for surrogates
        and "\\" not in name
        and len(name.encode()) <= _MAX_BYTES
        and not {"", ".", ".."}.intersection(parts)
        and all(len(part.encode()) <= _MAX_PART_BYTES for part in parts)
    )
    if not is_plain:
        raise UnsafePathError(
            f"{source} names a file outside of its folder, or one that cannot be written",
            expected="a relative path such as model/config.json: printable, without '..', '.', "
            f"'//' and '\\', at most {_MAX_BYTES} bytes and {_MAX_PART_BYTES} bytes per part",
            got=repr(name[:120]),
            fix="do not use it before you know who wrote that name; then rename or remove the file",
        )
    return name
