"""A copy of what names and builds images, so that tests change neither a checkout nor its site/."""

import shutil
import sys
from pathlib import Path

from tests.commands import REPOSITORY


def copy_checkout(folder: Path) -> Path:
    """Makes one, without what the site of this checkout adds to its images.

    Args:
        folder: Where, an empty one.

    Returns:
        The folder, in which `deployment/images/build.sh` runs.
    """
    ignored = shutil.ignore_patterns(
        "__pycache__", "*.crt", "*.whl", "*.sources", "*.list", "pip.conf"
    )
    for name in ("tasks", "deployment"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder
