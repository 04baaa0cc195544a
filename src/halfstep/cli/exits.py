"""How a subcommand ends when it does not end well."""

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


class CommandError(Exception):
    """One line for the user: what is wrong and what to do. Printed without a traceback."""


def require_rich() -> None:
    """Look whether rich is there.

    Raises:
        CommandError: It is not.
    """
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        raise CommandError(
            "needs the package rich, which is not installed; install it with: pip install rich"
        ) from None
