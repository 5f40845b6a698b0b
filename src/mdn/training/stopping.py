"""Ctrl-C and SIGTERM: during training they ask for a stop after the current step; elsewhere they stop at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(BaseException):
    """The user (or a job scheduler) asked to stop, and nothing is pending that must be saved first."""


class StopSignal:
    """Remembers that a stop was asked for. While `deferred`, it only remembers; else it raises StopRequested."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.requested
        self.requested = True
        if not self._deferred:
            raise StopRequested(signal.Signals(number).name)
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now; the last checkpoint on disk stays whole

    @contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """Handle the signals inside the block. Only the main thread can; elsewhere nothing is installed."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a signal is remembered for whoever looks at `requested`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
