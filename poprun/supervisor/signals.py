"""The signals that poprun takes and sends during a job."""

from __future__ import annotations

import signal

END_SIGNAL = signal.SIGHUP
"""The signal that ends mpirun and all of its processes at once."""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a job."""
SAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The interrupts after which programs get the time that they have asked for to save."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""The signals that programs get, and that do not end a job."""
