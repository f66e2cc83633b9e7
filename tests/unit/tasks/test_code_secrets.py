"""Code with private keys or credentials is refused before it is uploaded."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.errors import ConfigError
from tasks.flyte.code_secrets import CHECKOUT, main, refuse_secrets
from tests.commands import REPOSITORY

KEY = "-----BEGIN {}PRIVATE" + " KEY-----\nMIIEvg==\n"  # in two, since this file is uploaded, too
SECRETS = {
    "tls.pem": (KEY.format(""), "a private key"),
    "folder/id_ed25519": (KEY.format("OPENSSH "), "a private key"),
    "account.json": (f'{{"private_key": {KEY.format("")!r}}}', "a private key"),
    "kube": ("users:\n- user:\n    client-key-data: LS0t\n", "the key of a kubeconfig"),
    "mine.env": (f"export AWS_SECRET_ACCESS_KEY='{'a1' * 20}'\n", "credentials of Amazon"),
    "hub.env": ("HF_TOKEN=hf_" + "aB3" * 11, "a token of Hugging Face"),
    "flyte.env": ("FLYTE_CREDENTIALS_CLIENT_" + "SECRET=abcd1234", "a secret of Flyte's client"),
    "credentials": ("[default]\naws_secret_access_key = abc\n", "credentials of Amazon"),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "code.py").write_text("client(aws_secret_access_key=secret)\n")
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def track(folder: Path) -> None:
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_refused_with_their_path(
    checkout: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_secrets(checkout)
    assert main(str(checkout)) == 0
    text, kind = SECRETS[name]
    write(checkout, name, text)
    with pytest.raises(ConfigError, match="hold secrets") as error:
        refuse_secrets(checkout)
    assert error.value.got == f"{name} ({kind})"
    track(checkout)
    assert main(str(checkout)) == 2
    assert f"got: {name} ({kind})\n  fix: move them out of the checkout" in capsys.readouterr().err


def test_ignored_files_may_contain_secrets(checkout: Path) -> None:
    for name, (text, _) in SECRETS.items():
        write(checkout, name, text)
    with pytest.raises(ConfigError) as error:
        refuse_secrets(checkout)
    assert str(error.value.got).count("(") == len(SECRETS)
    (checkout / ".gitignore").write_text("\n".join(SECRETS))
    refuse_secrets(checkout)
    (checkout / ".gitignore").unlink()
    track(checkout)
    (checkout / ".flyteignore").write_text("\n".join(SECRETS))
    refuse_secrets(checkout)


def test_without_git_all_files_are_scanned(tmp_path: Path) -> None:
    write(tmp_path, "code.py", "")
    refuse_secrets(tmp_path)
    write(tmp_path, "folder/tls.key", KEY.format("RSA "))
    with pytest.raises(ConfigError, match=r"folder/tls\.key \(a private key\)"):
        refuse_secrets(tmp_path)


def test_the_checkout_holds_no_secret_and_ignores_the_usual_ones() -> None:
    assert CHECKOUT == REPOSITORY
    refuse_secrets(REPOSITORY)
    usual = ["tls.key", "tls.crt", "flyte.yaml", "secrets.env", ".env", "folder/own.key", ".netrc"]
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *usual],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ignored.stdout.split() == usual


def test_a_nested_repository_is_scanned(checkout: Path) -> None:
    subprocess.run(["git", "init", "-q", "nested"], cwd=checkout, check=True)
    write(checkout, "nested/folder/tls.pem", SECRETS["tls.pem"][0])
    with pytest.raises(ConfigError) as error:
        refuse_secrets(checkout)
    assert error.value.got == "nested/folder/tls.pem (a private key)"


def test_without_git_every_nested_file_is_scanned(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    refuse_secrets(checkout)
    write(checkout, "tls.pem", SECRETS["tls.pem"][0])
    with pytest.raises(ConfigError, match="hold secrets"):
        refuse_secrets(checkout)


def test_a_link_to_a_folder_is_not_followed(checkout: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere, "tls.pem", SECRETS["tls.pem"][0])
    (checkout / "link").symlink_to(elsewhere)
    refuse_secrets(checkout)
