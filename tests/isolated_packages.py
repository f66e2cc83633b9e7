"""Hand-made packages: as an installed folder, or as a wheel that needs no network."""

import base64
import zipfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path


def files_of(name: str, version: str, code: str, requires: Sequence[str]) -> dict[str, str]:
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{name}/__init__.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(sha256(text.encode()).digest()).decode()[:43]},"
        for path, text in files.items()
    ]
    return {**files, f"{info}/RECORD": "\n".join([*lines, f"{info}/RECORD,,", ""])}


def write_package(
    folder: Path, name: str, version: str, code: str = "", requires: Sequence[str] = ()
) -> None:
    for path, text in files_of(name, version, code, requires).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def write_wheel(
    folder: Path, name: str, version: str, code: str = "", requires: Sequence[str] = ()
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files_of(name, version, code, requires).items():
            wheel.writestr(path, text)
