"""Writes the report of `first_gpu_run.sh`: first_gpu_report.py FOLDER_OF_LOGS REPORT.

Needs only Python 3. Names of machines, people and secrets are replaced before anything is written.
"""

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

EXPECTED = {
    "gpu": "H100, driver 580 or newer",
    "compiler": "gcc or clang compiles an extension of Python",
    "install": "3 min",
    "doctor": "no `fail`",
    "imports": "1 min; every file has one owner, all modules import",
    "attention": "64 x 128 tokens: varlen 62 ms, flex 65, sdpa 398",
    "backends": "1.5 B, bfloat16: 22,700 tokens/s and 49 GiB; recomputed 18,900 and 24",
    "transfers": "3.2 GB by CUDA IPC in 0.2 s, by shared memory in 1.3 s",
    "turns": "128 prompts; asleep 17 GiB and less, no growth; the second run is cached",
    "run": "3 steps; the plan's figures are above them",
}
"""Results of one H100 (docs/h100.md), by step."""
_FIGURES = re.compile(r'^\{"|^[\w ,]+: (\{"|MiB|\[)|, seconds: |^(varlen|flex|sdpa)\b|tokens/s')
_RESULTS = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED)|^=+ .*(passed|failed|error).* =+$")
_SECRET_NAMES = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_PATTERNS = (
    (re.compile(r"\b(hf_|sk-|ghp_|gho_|github_pat_|xox[a-z]-|AKIA)[\w-]{8,}"), "SECRET"),
    (re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+@"), "SECRET@"),
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "GPU-ID"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?=:\d|\b(?!\.))"), "ADDRESS"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "MAIL"),
    (re.compile(r"(?<![\w.~])/(?:home|root|Users|data|mnt|scratch|srv)/[^\s'\":,)]*"), "PATH"),
    (re.compile(r"/tmp/[^\s'\"/:,)]+"), "/tmp/…"),
    (re.compile("\x1b\\[[0-9;?]*[a-zA-Z]"), ""),
)
_NUM_FIGURES, _NUM_LINES = 60, 40
_SHORTEST_NAME = 3


def cleaned(text: str, environment: Mapping[str, str], *, checkout: Path, host: str) -> str:
    """Removes names of machines and people, secrets, and paths outside the checkout from a text."""
    secrets = [
        value
        for name, value in environment.items()
        if _SECRET_NAMES.search(name) and len(value) >= _SHORTEST_NAME
    ]
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "SECRET")
    text = text.replace(f"{checkout}/", "").replace(str(checkout), ".")
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    names = {host: "HOST", host.split(".", maxsplit=1)[0]: "HOST"}
    names |= {environment.get(name, ""): "USER" for name in ("USER", "LOGNAME", "SUDO_USER")}
    for name, replacement in names.items():
        if len(name) >= _SHORTEST_NAME and name != "root":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", replacement, text)
    return text


def report(logs: Path, *, commit: str) -> str:
    """Returns the report on the steps of a folder, as Markdown; not cleaned yet."""
    steps = [line.split() for line in (logs / "steps").read_text().splitlines()]
    lines = [
        "# The first hour on a GPU",
        "",
        f"Commit {commit}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.release()}, {os.cpu_count()} cores.",
        "",
        "| step | result | seconds | expected on one H100 |",
        "|---|---|---|---|",
    ]
    for name, code, seconds in steps:
        result = "ok" if code == "0" else f"exit code {code}"
        lines.append(f"| {name} | {result} | {seconds} | {EXPECTED[name]} |")
    for name, code, _ in steps:
        lines += ["", f"## {name}", "", "```text", *_shown(logs / name, failed=code != "0"), "```"]
    return "\n".join(lines) + "\n"


def _shown(log: Path, *, failed: bool) -> list[str]:
    """Returns figures and results of a step; also its end, if it failed or has neither."""
    lines = [line.rstrip()[:400] for line in log.read_text(errors="replace").splitlines()]
    lines = [line.replace("```", "'''") for line in lines if line.strip()]
    shown = [line for line in lines if _FIGURES.search(line) or _RESULTS.search(line)]
    if failed or not shown:
        return [*shown[-_NUM_FIGURES:], *(["[...]"] if shown else []), *lines[-_NUM_LINES:]]
    return shown[-_NUM_FIGURES:]


def main(logs: str, target: str) -> None:
    """Writes the report on a folder of logs."""
    checkout = Path(__file__).resolve().parents[1]
    git = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    text = report(Path(logs), commit=git.stdout.strip() or "unknown")
    text = cleaned(text, os.environ, checkout=checkout, host=socket.gethostname())
    Path(target).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
