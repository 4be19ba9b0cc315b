"""Whether the engine process still answers: a process that hangs or is stopped does not die."""

from __future__ import annotations

import time

#: seconds between two questions to the engine; an idle one wakes once for each
INTERVAL = 10.0
#: seconds that an answer may take, beside LONG_STEPS times the longest step: it comes between steps
PATIENCE = 30.0
LONG_STEPS = 3.0


class Pulse:
    """Since when the engine has owed a sign of life, and how long it may.

    Args:
        longest_step: seconds of the longest step, as the engine's cost model has it. The model
            learns, so set the attribute whenever the engine tells.
    """

    def __init__(self, longest_step: float = 0.0) -> None:
        self.longest_step = longest_step
        self._asked, self._owed = time.monotonic(), False

    def heard(self) -> None:
        """A message came, of whatever kind."""
        self._owed = False

    @property
    def due(self) -> bool:
        """Whether to ask the engine how it is. A busy one is asked too: its answer says how long it
        may be silent later."""
        return not self._owed and time.monotonic() - self._asked >= INTERVAL

    def asked(self) -> None:
        """It has been asked, and owes a sign of life from now on."""
        self._asked, self._owed = time.monotonic(), True

    @property
    def patience(self) -> float:
        """Seconds that a sign of life may take."""
        return PATIENCE + LONG_STEPS * self.longest_step

    @property
    def lost(self) -> bool:
        """Whether a sign of life has been owed for too long."""
        return self._owed and time.monotonic() - self._asked > self.patience
