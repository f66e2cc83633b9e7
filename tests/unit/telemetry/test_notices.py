"""Notices over real sockets: an HTTP server and a mail server on loopback."""

from collections.abc import Iterator
from email import message_from_bytes

import pytest

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.telemetry.notices import check_addresses, mail_addresses, send, webhooks
from tests.notice_servers import Mailbox, hook, mail_server


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with mail_server() as box:
        yield box


def test_a_webhook_receives_slacks_format() -> None:
    with hook() as (address, posted):
        variables = {"NEMO_RL_NOTIFY": f"{address}, {address}"}
        assert send("grpo r1 failed", "it is\nover", environment=variables) == []
    one = {"path": "/services/T0/secret", "text": "grpo r1 failed\nit is\nover"}
    assert posted == [one, one]


def test_mail_arrives_with_its_login(mailbox: Mailbox) -> None:
    variables = {
        "NEMO_RL_NOTIFY": "a@example.com,b@example.com",
        "NEMO_RL_SMTP": f"smtp://me:p%40ss@{mailbox.address}?from=runs@example.com",
    }
    assert send("grpo r1 succeeded", "0.99 ± 0.01", environment=variables) == []
    ((sender, to, data),) = mailbox.kept
    assert (sender, to) == ("runs@example.com", ["a@example.com", "b@example.com"])
    message = message_from_bytes(data.encode())
    assert message["Subject"] == "grpo r1 succeeded"
    content = message.get_payload(decode=True)
    assert isinstance(content, bytes)
    assert content.decode().strip() == "0.99 ± 0.01"
    assert mailbox.logins == ["AG1lAHBAc3M="]  # \0me\0p@ss


def test_mail_without_a_server_is_left_to_flyte(mailbox: Mailbox) -> None:
    assert send("a", "b", environment={"NEMO_RL_NOTIFY": "a@example.com"}) == []
    assert mailbox.kept == []


def test_a_failure_is_logged_without_the_secret(caplog: pytest.LogCaptureFixture) -> None:
    with hook(status=503) as (address, _):
        gone = "http://127.0.0.1:9/services/T0/secret"
        variables = {
            "NEMO_RL_NOTIFY": f"{address},{gone},a@example.com",
            "NEMO_RL_SMTP": "smtp://me:hidden@127.0.0.1:9",
        }
        problems = send("a", "b", environment=variables)
    assert len(problems) == 3
    assert "503 Service Unavailable" in problems[0]
    assert "refused" in problems[1]
    assert problems[2].startswith("mail by 127.0.0.1: ConnectionRefusedError")
    assert all(problem in caplog.text for problem in problems)
    assert "secret" not in caplog.text
    assert "hidden" not in caplog.text


def test_a_failing_address_does_not_affect_the_others() -> None:
    with hook() as (address, posted):
        variables = {"NEMO_RL_NOTIFY": f"http://127.0.0.1:9/x,{address}"}
        assert len(send("a", "b", environment=variables)) == 1
    assert [each["text"] for each in posted] == ["a\nb"]


def test_webhooks_and_mail_addresses_are_distinguished() -> None:
    variables = {"NEMO_RL_NOTIFY": "a@b.de, https://hooks.slack.com/services/x ,,c@d.de"}
    assert mail_addresses(variables) == ["a@b.de", "c@d.de"]
    assert webhooks(variables) == ["https://hooks.slack.com/services/x"]
    check_addresses(variables)
    check_addresses({})


@pytest.mark.parametrize(
    ("variables", "got"),
    [
        ({"NEMO_RL_NOTIFY": "somebody"}, "somebody"),
        ({"NEMO_RL_NOTIFY": "ftp://host/secret"}, "ftp://host/…"),
        ({"NEMO_RL_NOTIFY": "https:///secret"}, "https:///…"),
        ({"NEMO_RL_SMTP": "mail.example.com:25"}, "no scheme"),
        ({"NEMO_RL_SMTP": "https://me:secret@host"}, "the scheme 'https'"),
    ],
)
def test_invalid_addresses_are_refused(variables: dict[str, str], got: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_addresses(variables)
    assert refused.value.got == got
    assert "secret" not in str(refused.value)
