"""Program of an agent that is a Python function; started as `function.py module:function`.

It uses only the standard library, since it starts once per episode. The row is read from the
standard input, and the result is written as the last line of the output.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Calls the function that the first argument names, with the endpoint and the row."""
    row = json.load(sys.stdin)
    module, _, name = sys.argv[1].partition(":")
    sys.path.append(str(Path.cwd()))  # last, as for rewards and environments of a recipe
    run = getattr(importlib.import_module(module), name)
    result = run(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    fields = result if isinstance(result, dict) else {"reward": result}
    sys.stdout.write(f"\n{json.dumps(fields, default=float)}\n")


if __name__ == "__main__":
    main()
