"""Notices of how a run ended: webhooks that take Slack's JSON, and mail over SMTP.

The places come from the environment alone, since the address of a webhook is a secret that no
recipe and no record should hold. A notice that cannot be sent is logged and changes no run.
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
"""Webhooks and mail addresses, with commas between them."""
SMTP = "NEMO_RL_SMTP"
"""The mail server, as `smtp://user:password@host:587?from=runs@example.com`, or `smtps://`."""

_LOG = logging.getLogger(__name__)
_SECONDS = 10.0
_SCHEMES = ("http", "https")
_PORTS = {"smtp": 25, "smtps": 465}


def mail_addresses(environment: Mapping[str, str]) -> list[str]:
    """The mail addresses in `NEMO_RL_NOTIFY`.

    Example:
        >>> mail_addresses({"NEMO_RL_NOTIFY": "a@example.com, https://hooks.example.com/T1"})
        ['a@example.com']
    """
    return [each for each in _places(environment) if "://" not in each]


def webhooks(environment: Mapping[str, str]) -> list[str]:
    """The addresses of webhooks in `NEMO_RL_NOTIFY`."""
    return [each for each in _places(environment) if "://" in each]


def check_places(environment: Mapping[str, str]) -> None:
    """Refuses what no notice could be sent to.

    Raises:
        ConfigError: For a place that is neither a webhook nor a mail address, and for a mail server
            that is none. No message shows more of a webhook than its host.
    """
    for each in _places(environment):
        is_hook = urlsplit(each).scheme in _SCHEMES and bool(urlsplit(each).hostname)
        if not is_hook and ("://" in each or each.count("@") != 1 or each.startswith("@")):
            raise ConfigError(
                f"{NOTIFY} names no place for a notice",
                expected="https://… of a webhook, or a mail address; with commas between several",
                got=_shown(each),
                fix=f"correct {NOTIFY}, or unset it",
            )
    server = environment.get(SMTP, "")
    if server and (urlsplit(server).scheme not in _PORTS or not urlsplit(server).hostname):
        raise ConfigError(
            f"{SMTP} names no mail server",
            expected="smtp://[user:password@]host[:port][?from=ADDRESS], or smtps://…",
            got=f"the scheme {urlsplit(server).scheme!r}" if "://" in server else "no scheme",
            fix=f"correct {SMTP}, or unset it",
        )


def send(subject: str, text: str, *, environment: Mapping[str, str] | None = None) -> list[str]:
    """Sends a notice to every webhook and, where there is a mail server, every address.

    Each place has ten seconds. Every failure is logged.

    Args:
        subject: One line: which run, and how it ended.
        text: Further lines.
        environment: Has `NEMO_RL_NOTIFY` and `NEMO_RL_SMTP`; by default that of the process.

    Returns:
        What went wrong, a line a place.
    """
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    for hook in webhooks(environment):
        problems += _tried(_shown(hook), partial(_post, hook, f"{subject}\n{text}"))
    addresses, server = mail_addresses(environment), environment.get(SMTP, "")
    if addresses and server:
        host = f"mail by {urlsplit(server).hostname}"
        problems += _tried(host, partial(_mail, server, addresses, subject, text))
    for problem in problems:
        _LOG.warning("the notice of the run's end was not sent: %s", problem)
    return problems


def _places(environment: Mapping[str, str]) -> list[str]:
    return [each.strip() for each in environment.get(NOTIFY, "").split(",") if each.strip()]


def _shown(place: str) -> str:
    """A place without what is secret in it: paths, queries and passwords of addresses."""
    parts = urlsplit(place)
    return f"{parts.scheme}://{parts.hostname or ''}/…" if "://" in place else place


def _tried(place: str, deliver: Callable[[], None]) -> list[str]:
    try:
        deliver()
    except Exception as error:  # noqa: BLE001  (a notice must not fail a run that has ended)
        # Not the text of other errors: it may hold the address of the webhook.
        code = getattr(error, "code", None) or getattr(error, "smtp_code", None)
        reason = getattr(error, "reason", None) or (
            error if isinstance(error, OSError) and code is None else ""
        )
        said = " ".join(str(part) for part in (code, reason) if part)
        return [f"{place}: {type(error).__name__} {said}".rstrip()]
    return []


def _post(hook: str, text: str) -> None:
    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(hook, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_SECONDS):
        pass


def _mail(server: str, addresses: list[str], subject: str, text: str) -> None:
    parts = urlsplit(server)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    named = parse_qs(parts.query).get("from", [])
    message = EmailMessage()
    message["Subject"] = " ".join(subject.split())
    message["From"] = named[0] if named else user if "@" in user else f"nemo-rl@{parts.hostname}"
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
