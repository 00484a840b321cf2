"""Check a serve.yaml before `serve deploy`, which ignores unknown keys: `python deploy/check_serve.py FILE.yaml`.

Exit code 0: every key is known and the arguments are valid; 2: one sentence says what is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from actors.serve_args import check_config
from model.errors import UserError


def main(arguments: list[str]) -> int:
    """Check the one file that is named."""
    if len(arguments) != 1:
        print("usage: python deploy/check_serve.py FILE.yaml", file=sys.stderr)
        return 2
    try:
        check_config(Path(arguments[0]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments[0]}: every key is known.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
