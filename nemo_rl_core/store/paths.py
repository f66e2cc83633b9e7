"""Local paths made from names that this code did not choose.

Names in a listing, an archive, an index, a manifest or a record may be hostile: `../x`, `/etc/x`,
or a folder that is a link. `tests/unit/store/test_joined_paths.py` finds joins that skip
`resolve_below`.
"""

from pathlib import Path

from nemo_rl_core.errors import UnsafePathError

_MAX_PART_BYTES = 200
"""Longest part of a name. File systems allow 255, and unfinished files have longer names."""
_MAX_BYTES = 1024
"""Longest name, as in S3."""


def resolve_below(root: Path, name: str, *, source: str, may_link: bool = False) -> Path:
    """Returns the path of a name below a folder.

    Args:
        root: The folder. It may be missing.
        name: A relative path with `/`, such as `model/config.json`.
        source: Where the name was found, for the error, such as "the listing of s3://bucket/m".
        may_link: Whether the last part may be a link that leads out of the folder, as in the caches
            of the Hugging Face hub and of a node.

    Raises:
        UnsafePathError: If the name is empty, absolute, longer than 1024 bytes, has a part that is
            empty, `.`, `..` or longer than 200 bytes, has a backslash or a character that cannot be
            printed, or leads out of the folder through a link.

    Example:
        >>> resolve_below(Path("/store"), "runs/one/run.log", source="history.db")
        PosixPath('/store/runs/one/run.log')
    """
    path = root / checked_name(name, source=source)
    try:
        inside = (path.parent if may_link else path).resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a loop of links
        inside = False
    if not inside:
        raise UnsafePathError(
            f"{source} names a file outside of its folder",
            expected=f"a path below {root}",
            got=f"{name!r}, which leads out through a link",
            fix="remove the link",
        )
    return path


def checked_name(name: str, *, source: str) -> str:
    """Returns a name if it is safe below a folder without links.

    Args:
        name: A relative path with `/`.
        source: Where the name was found, for the error.

    Raises:
        UnsafePathError: For each reason of `resolve_below` except a link.
    """
    parts = name.split("/")
    is_plain = (
        name.isprintable()  # a text of surrogates is not
        and "\\" not in name
        and len(name.encode()) <= _MAX_BYTES
        and not {"", ".", ".."}.intersection(parts)
        and all(len(part.encode()) <= _MAX_PART_BYTES for part in parts)
    )
    if not is_plain:
        raise UnsafePathError(
            f"{source} names a file outside of its folder, or one that cannot be written",
            expected="a relative path such as model/config.json: printable, without '..', '.', "
            f"'//' and '\\', at most {_MAX_BYTES} bytes and {_MAX_PART_BYTES} a part",
            got=repr(name[:120]),
            fix="do not use it before you know who wrote that name; then rename or remove the file",
        )
    return name
