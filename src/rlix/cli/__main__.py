"""`rlix`, also as `python -m rlix.cli`."""

import signal


def main() -> None:
    """Ctrl-C while the commands are imported ends the process without a traceback; from then on they see to it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rlix.cli.main import app

    signal.signal(signal.SIGINT, before)
    app()


if __name__ == "__main__":
    main()
