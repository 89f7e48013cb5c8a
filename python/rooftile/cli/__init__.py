# SPDX-License-Identifier: Apache-2.0
"""The command `rooftile`. Every module of this package is a subcommand, but those whose name starts with an underscore.

A subcommand module has SUMMARY (one line), add_arguments(parser) and run(args), which returns the exit status, and
imports torch and the like inside run(), so that `rooftile --help` is quick.

Exit status: 0 done, 1 something failed (network, device, disk, missing package), 2 wrong arguments, 130 interrupted,
128 + n ended by signal n (SIGTERM, SIGHUP): what was begun is taken away first.
"""

import argparse
import contextlib
import errno
import importlib
import os
import pkgutil
import signal
import sys
import threading

from rooftile import _C, __version__
from rooftile.errors import ArgumentError, ArgumentTypeError, NotSupportedError, RooftileError

# the extra "demo", by the names on a package index
_OPTIONAL_PACKAGES = ("torch", "transformers", "safetensors", "gguf", "matplotlib")


def main(arguments=None):
    """Runs `rooftile <arguments>` (default: sys.argv) and returns the exit status; errors are one line on stderr."""
    if sys.stdout is None:  # closed before Python began
        print("rooftile: error: standard output: is closed", file=sys.stderr)
        return 1
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return _run(args)
    except (ArgumentError, ArgumentTypeError, NotSupportedError) as e:
        return _fail(args, e, 2)
    except RooftileError as e:
        return _fail(args, e, 1)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] not in (*_OPTIONAL_PACKAGES, "tokenizers"):
            raise
        return _fail(args, f"needs the package '{e.name}': pip install {' '.join(_OPTIONAL_PACKAGES)}", 1)
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        _no_more_output()
        return 1
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        _no_more_output()
        return _fail(args, f"{e.filename or 'standard output'}: {e.strerror}", 1)
    except KeyboardInterrupt:
        return _fail(args, "interrupted", 130)
    except _Ended as e:
        return _fail(args, f"ended by {e.signal.name}", 128 + e.signal)


def _run(args):
    with _signals_raise() as came:
        try:
            status = args.run(args)
            sys.stdout.flush()
            return status
        except Exception:  # C code, as torch.tensor's, may make an error of its own of what a handler raises
            if came:
                raise came[0] from None
            raise


class _Ended(BaseException):
    def __init__(self, number):
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _signals_raise():
    """SIGINT, SIGTERM and SIGHUP as exceptions, so that unfinished files are taken away. One that is ignored (nohup)
    stays so; outside the main thread Python handles none. Yields the list of the exceptions that were raised."""
    before, came = {}, []

    def raise_it(number, frame):
        came.append(KeyboardInterrupt() if number == signal.SIGINT else _Ended(number))
        raise came[-1]

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, raise_it)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _no_more_output():
    """What is still buffered goes nowhere, instead of failing once more at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def _check_value(self, action, value):  # of commands and of arguments with choices
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as e:
            e.message += _C.did_you_mean(str(value), *map(str, action.choices))
            raise


def _parser():
    parser = _Parser(prog="rooftile", description="LLM-inference kernels: look, try, measure.")
    parser.add_argument("--version", action="version", version=f"rooftile {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        command = commands.add_parser(info.name, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _fail(args, message, status):
    print(f"rooftile {args.command}: error: {message}", file=sys.stderr)
    return status
