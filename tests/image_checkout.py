"""Copies the files that name and build images, so that tests do not change a checkout or site/."""

import shutil
import sys
from pathlib import Path

from tests.commands import REPOSITORY


def copy_checkout(folder: Path) -> Path:
    """Copies them, without the site additions of this checkout.

    Args:
        folder: Empty target folder.

    Returns:
        Path of the folder, in which `deployment/images/build.sh` runs.
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
