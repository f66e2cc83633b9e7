"""Notices of alarms and of the end of a run: webhooks that accept Slack's JSON, and mail over SMTP.

The addresses come only from the environment, since the address of a webhook is a secret that must
not be in recipes or records. A notice that cannot be sent is logged and does not affect the run.
"""

import json
import logging
import os
import smtplib
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from functools import partial
from urllib.parse import parse_qs, unquote, urlsplit

from nemo_rl_core.errors import ConfigError

NOTIFY = "NEMO_RL_NOTIFY"
"""Environment variable with webhooks and mail addresses, separated by commas."""
SMTP = "NEMO_RL_SMTP"
"""Environment variable with the mail server, `smtp://` or `smtps://`, such as
`smtp://user:password@host:587?from=runs@example.com`."""

_LOG = logging.getLogger(__name__)
_SECONDS = 10.0
_SCHEMES = ("http", "https")
_PORTS = {"smtp": 25, "smtps": 465}


def mail_addresses(environment: Mapping[str, str]) -> list[str]:
    """Returns the mail addresses in `NEMO_RL_NOTIFY`.

    Example:
        >>> mail_addresses({"NEMO_RL_NOTIFY": "a@example.com, https://hooks.example.com/T1"})
        ['a@example.com']
    """
    return [each for each in _addresses(environment) if "://" not in each]


def webhooks(environment: Mapping[str, str]) -> list[str]:
    """Returns the addresses of webhooks in `NEMO_RL_NOTIFY`."""
    return [each for each in _addresses(environment) if "://" in each]


def check_addresses(environment: Mapping[str, str]) -> None:
    """Refuses invalid addresses and mail servers; messages show only the host of a webhook."""
    for address in _addresses(environment):
        is_hook = urlsplit(address).scheme in _SCHEMES and bool(urlsplit(address).hostname)
        if not is_hook and ("://" in address or address.count("@") != 1 or address.startswith("@")):
            raise ConfigError(
                f"{NOTIFY} has an invalid address",
                expected="https://… of a webhook, or a mail address; several separated by commas",
                got=_shown(address),
                fix=f"correct {NOTIFY}, or unset it",
            )
    server = environment.get(SMTP, "")
    if server and (urlsplit(server).scheme not in _PORTS or not urlsplit(server).hostname):
        raise ConfigError(
            f"{SMTP} is not a mail server",
            expected="smtp://[user:password@]host[:port][?from=ADDRESS], or smtps://…",
            got=f"the scheme {urlsplit(server).scheme!r}" if "://" in server else "no scheme",
            fix=f"correct {SMTP}, or unset it",
        )


def send(subject: str, text: str, *, environment: Mapping[str, str] | None = None) -> list[str]:
    """Sends a notice to every webhook and, with a mail server, to every mail address.

    Each delivery has ten seconds. Failures are logged, and returned with one line per address.
    """
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    for hook in webhooks(environment):
        problems += _deliver(_shown(hook), partial(_post, hook, f"{subject}\n{text}"))
    addresses, server = mail_addresses(environment), environment.get(SMTP, "")
    if addresses and server:
        host = f"mail by {urlsplit(server).hostname}"
        problems += _deliver(host, partial(_mail, server, addresses, subject, text))
    for problem in problems:
        _LOG.warning("a notice was not sent: %s", problem)
    return problems


def _addresses(environment: Mapping[str, str]) -> list[str]:
    return [each.strip() for each in environment.get(NOTIFY, "").split(",") if each.strip()]


def _shown(address: str) -> str:
    """Returns an address without its secret parts: path, query and password."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.hostname or ''}/…" if "://" in address else address


def _deliver(address: str, deliver: Callable[[], None]) -> list[str]:
    try:
        deliver()
    except Exception as error:  # noqa: BLE001  (a notice must not fail a finished run)
        # The text of other errors may contain the address of the webhook.
        code = getattr(error, "code", None) or getattr(error, "smtp_code", None)
        reason = getattr(error, "reason", None) or (
            error if isinstance(error, OSError) and code is None else ""
        )
        details = " ".join(str(part) for part in (code, reason) if part)
        return [f"{address}: {type(error).__name__} {details}".rstrip()]
    return []


def _post(hook: str, text: str) -> None:
    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(hook, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_SECONDS):
        pass


def _mail(server: str, addresses: list[str], subject: str, text: str) -> None:
    parts = urlsplit(server)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    senders = parse_qs(parts.query).get("from", [])
    message = EmailMessage()
    message["Subject"] = " ".join(subject.split())
    message["From"] = (
        senders[0] if senders else user if "@" in user else f"nemo-rl@{parts.hostname}"
    )
    message["To"] = ", ".join(addresses)
    message.set_content(text)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    secured = ssl.create_default_context()
    with (
        smtplib.SMTP_SSL(host, port, timeout=_SECONDS, context=secured)
        if parts.scheme == "smtps"
        else smtplib.SMTP(host, port, timeout=_SECONDS)
    ) as client:
        client.ehlo_or_helo_if_needed()
        if parts.scheme == "smtp" and client.has_extn("starttls"):
            client.starttls(context=secured)
        if user:
            client.login(user, password)
        client.send_message(message)
