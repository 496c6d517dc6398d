"""How long poprun waits for what while it runs a job; docs/failures.md says what follows from it."""

from __future__ import annotations

import signal

END_SIGNAL = signal.SIGHUP
"""Tells mpirun to end at once, with all that it has started."""
LOOK_S = 0.2
"""How often instances are asked what they do."""
QUICK_LOOK_S = 0.08
"""The same once an instance has ended or is leaving."""
SETTLE_S = 0.06
"""After the first failure: how long reports under way are waited for before anyone is blamed."""
SETTLE_LIMIT_S = 0.5
"""The same where an instance has not answered yet what it does, as on a machine with too few cores."""
LOST_HOST_SETTLE_S = 0.5
"""The same where mpirun has ended before its instances: those on a host whose daemon is gone end by and by."""
EXAMINE_S = 5.0
"""How long an instance that is stuck may take to show where; its agent waits less long for it."""
LEAVE_S = 0.5
"""How long an instance that is to blame and still in its exit handlers may take to heed that it is released."""
LEAVE_LIMIT_S = 3.0
"""How long it may then take to show its exit status."""
TOLD_LIMIT_S = 5.0
"""How long it may take until all others are told to stop, or mpirun has ended, once an agent was told to."""
INTERRUPT_GRACE_S = 0.9
"""How long programs may take to end after Ctrl-C or SIGTERM, unless they have said that they need longer to save."""
CLOSE_LIMIT_S = 0.4
"""How long agents may take to end what is left of their instances."""
MPIRUN_LIMIT_S = 0.6
"""How long mpirun may take to end after it was told to; killed, it would leave files behind."""
