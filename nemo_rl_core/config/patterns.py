"""Patterns that texts of a recipe must match, and the error message of each."""

from typing import Final

FUNCTION: Final = r"^[\w.]+:\w+$"
ALIAS_NAME: Final = r"^[a-z0-9][a-z0-9_.-]{0,62}$"
MEMBER_OR_NAME: Final = r"^[\w.-]+(:\w+(\.\w+)*)?$"
HTTP_URL: Final = r"^https?://\S+$"
LOOPBACK_URL: Final = r"^http://(127\.0\.0\.1|localhost|\[::1\])[:/]\S*$"
VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
MESSAGES: Final[dict[str, str]] = {
    FUNCTION: "must be module:function, as in my_rewards:score",
    ALIAS_NAME: "must have lower-case letters, digits, '_', '-' and '.' only, as in production",
    MEMBER_OR_NAME: "must be module:name, as in my_game:Game, or a registered name",
    HTTP_URL: "must be an address, as in http://localhost:8000/v1",
    LOOPBACK_URL: "must be an address of this machine, as in http://127.0.0.1:8000/mcp",
    VARIABLE: "must be the name of an environment variable, as in JUDGE_API_KEY",
}
"""Error messages by pattern."""
