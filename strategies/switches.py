"""Options that are on or off, as all packages check them."""

from popdist.switches import require_switches, require_switches_or_none

__all__ = ["require_switches", "require_switches_or_none"]
