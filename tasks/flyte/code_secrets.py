"""Checks whether the code that goes to a cluster contains secrets, before it is uploaded.

flytekit uploads every file of the checkout that git does not ignore, tracked or not.
`python -m tasks.flyte.code_secrets FOLDER` exits with 2 if one of them looks like a secret.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from flytekit.tools.ignore import (
    DockerIgnore,
    FlyteIgnore,
    GitIgnore,
    IgnoreGroup,
    StandardIgnore,
)
from flytekit.tools.script_mode import list_all_files

from nemo_rl_core.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[2]

_MOST_BYTES = 2**20  # largest file to scan; keys and credentials are far smaller
_SECRETS = {
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",  # also in the JSON of a Google account
    "the key of a kubeconfig": rb"(?m)^ *client-key-data: *\S",
    "credentials of Amazon": rb"(?m)^aws_secret_access_key *= *\S"
    rb"|^\s*(?:export\s+)?(?:aws_secret_access_key|AWS_SECRET_ACCESS_KEY)\s*[=:]\s*"
    rb"[\"']?[A-Za-z0-9/+]{30}",
    "a token of Hugging Face": rb"\bhf_[A-Za-z0-9]{30}",
    "a secret of Flyte's client": rb"(?m)^\s*(?:export\s+)?FLYTE_CREDENTIALS_CLIENT_SECRET\s*[=:]"
    rb"\s*[\"']?[\w./+-]{8}",
}


def refuse_secrets(folder: Path) -> None:
    """Refuses to upload code with private keys or credentials."""
    secrets = [f"{path.relative_to(folder)} ({kind})" for path, kind in _secrets(folder)]
    if not secrets:
        return
    raise ConfigError(
        "files that would be uploaded with the code hold secrets, which every stage could read",
        expected="no private key and no credentials in what git does not ignore",
        got=", ".join(secrets[:8]) + (f" and {len(secrets) - 8} more" if len(secrets) > 8 else ""),
        fix="move them out of the checkout, or write them to .gitignore (to .flyteignore, where "
        "git tracks them); keys of stages belong to the secret nemo-rl-secrets",
    )


def _secrets(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in _uploaded(folder):
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            continue
        content = path.read_bytes()
        for kind, pattern in _SECRETS.items():
            if re.search(pattern, content):
                yield path, kind
                break


def _uploaded(folder: Path) -> list[Path]:
    """Lists files as flytekit does, but with git: a walk would enter `.venv`, too."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git here, or no repository
        all_rules = IgnoreGroup(str(folder), [GitIgnore, DockerIgnore, StandardIgnore, FlyteIgnore])
        return [Path(path) for path in list_all_files(str(folder), False, all_rules)]
    other_rules = IgnoreGroup(str(folder), [DockerIgnore, StandardIgnore, FlyteIgnore])
    names = sorted(set(filter(None, listed.decode(errors="surrogateescape").split("\0"))))
    files = (file for name in names for file in _files_at(folder / name))
    return [each for each in files if not other_rules.is_ignored(str(each.relative_to(folder)))]


def _files_at(path: Path) -> Iterator[Path]:
    if path.is_symlink() or not path.is_dir():
        yield path  # flytekit does not follow links to folders
        return
    for root, folders, names in os.walk(path):
        folders[:] = [each for each in folders if each != ".git"]
        yield from (Path(root, name) for name in names)


def main(folder: str) -> int:
    """Scans a folder that would be uploaded; returns the exit code."""
    try:
        refuse_secrets(Path(folder).resolve())
    except ConfigError as error:
        sys.stderr.write(f"register: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
