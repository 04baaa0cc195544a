"""The ``halfstep`` command, also as ``python -m halfstep``."""

import sys


def main() -> int:
    """Run the command line of the process, and return the exit code."""
    try:
        from halfstep._tools import cli
    except ModuleNotFoundError as error:
        if "halfstep[tools]" not in str(error):
            raise
        print(f"halfstep: {error}", file=sys.stderr)
        return 2
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
