"""`nemo-rl ui`: the page of the runs, on this machine."""

import ipaddress
import re
import socket
from contextlib import suppress
from pathlib import Path

import click
import rich_click


def _checked(_context: click.Context, _parameter: click.Parameter, token: str) -> str:
    if token and not re.fullmatch(r"[\w.~-]{16,}", token, re.ASCII):
        raise click.BadParameter("expected 16 or more letters, digits and . _ ~ -")
    return token


@rich_click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8321, show_default=True, type=click.IntRange(0, 65535),
              help="Port; 0 takes a free one.")  # fmt: skip
@click.option("--store", "folder", type=click.Path(file_okay=False, path_type=Path),
              help="The store; NEMO_RL_HOME or ~/.nemo_rl unless given.")  # fmt: skip
@click.option("--allow-host", multiple=True, help="A host name to accept requests for; repeatable.")
@click.option("--token", default="", envvar="NEMO_RL_UI_TOKEN", show_envvar=True,
              callback=_checked, help="A secret that requests must have.")  # fmt: skip
def ui(host: str, port: int, folder: Path | None, allow_host: tuple[str, ...], token: str) -> None:
    """Serve the page of the runs on this machine.

    The page is read-only and makes no network requests. Without --token it has no login: anyone who
    can reach the address can read the store. With one, open the address with ?token=TOKEN once, or
    send the header `Authorization: Bearer TOKEN`.
    """
    from nemo_rl_core.store.store import Store
    from nemo_rl_core.ui.app import create_app
    from nemo_rl_core.ui.server import create_server

    store = Store(folder) if folder else Store.default()
    fix = "pass another one; nemo-rl ui --port 0 takes any free port"
    listener = listen(host, port, what="page", fix=fix)
    bound = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"The runs of {store.root}: http://{shown}:{bound}/  (Ctrl-C ends it)")
    if not token and not _is_loopback(host):
        click.echo(
            "Anyone who can reach this address can read the store: there is no login.", err=True
        )
    app = create_app(store, hosts=[host, *allow_host], token=token)
    with suppress(KeyboardInterrupt):  # the intended way to stop
        create_server(app).run(sockets=[listener])


def listen(host: str, port: int, *, what: str, fix: str) -> socket.socket:
    """Returns a bound socket, so that the port is known and a used port raises an error."""
    from nemo_rl_core.errors import ResourceError

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # from here on clients wait for the server instead of being refused
    except OSError as error:
        raise ResourceError(
            f"the {what} cannot be served on {host}, port {port}",
            expected="an address of this machine and a free port",
            got=str(error),
            fix=fix,
        ) from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
