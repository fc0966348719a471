"""The program ``tierstate``, and ``python -m tierstate``: imports the command line, and runs it."""

import signal


def main() -> None:
    """Entry point of the program."""
    # The imports take seconds, in which there is nothing to finish: Ctrl-C ends the process as it ends any other
    # program, without a traceback, and without an abort where it comes in the C++ of torch.
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if a shell has it ignored
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as command

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
