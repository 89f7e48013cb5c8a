# SPDX-License-Identifier: Apache-2.0
"""Every error rooftile raises on purpose. Each message names the argument, what came and what is expected."""


class RooftileError(Exception):
    """Base of all errors below."""


class ArgumentError(RooftileError, ValueError):
    """An argument has a value that cannot be right (shape, range, device, layout)."""


class OutOfPagesError(ArgumentError):
    """A paged cache has fewer free pages than a call needs. The cache is as it was before the call."""


class ArgumentTypeError(RooftileError, TypeError):
    """An argument has the wrong type or dtype."""


class NotSupportedError(RooftileError, NotImplementedError):
    """A reasonable request that is not compiled or not implemented; the message lists what is."""


class DeviceError(RooftileError, RuntimeError):
    """The device or its driver failed."""


class OutOfMemoryError(DeviceError, MemoryError):
    """Memory that a call needs cannot be had; the framework's own error is its cause. Nothing was written."""


class FetchError(RooftileError, RuntimeError):
    """A file could not be fetched, or what came is not the file that was asked for."""
