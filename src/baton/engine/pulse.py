"""Whether the engine process still answers: a process that hangs or is stopped does not die."""

from __future__ import annotations

import time

#: seconds without a message after which the engine is asked for one; it wakes once for that
INTERVAL = 10.0
#: seconds that an answer may take, beside LONG_STEPS times the longest step: it comes between steps
PATIENCE = 30.0
LONG_STEPS = 3.0


class Pulse:
    """When the engine was last heard, and since when it has owed an answer.

    Args:
        longest_step: seconds of the longest step, as the engine's cost model has it.
    """

    def __init__(self, longest_step: float = 0.0) -> None:
        self.patience = PATIENCE + LONG_STEPS * longest_step
        self._heard, self._asked = time.monotonic(), 0.0

    def heard(self) -> None:
        """A message came, of whatever kind."""
        self._heard, self._asked = time.monotonic(), 0.0

    def ask(self) -> bool:
        """Whether to ask for a sign of life now; it is owed from now on."""
        now = time.monotonic()
        if self._asked or now - self._heard < INTERVAL:
            return False
        self._asked = now
        return True

    @property
    def lost(self) -> bool:
        """Whether a sign of life has been owed for too long."""
        return bool(self._asked) and time.monotonic() - self._asked > self.patience
