"""PopTorch's interface, under the name that programs import. Its modules are in `strategies.compat.poptorch`."""

import sys

import strategies.compat.poptorch as _interface
from strategies.compat.poptorch import *  # noqa: F403
from strategies.compat.poptorch import __all__ as __all__
from strategies.compat.poptorch import __getattr__ as __getattr__
from strategies.compat.poptorch import __version__ as __version__

for _name in ("autocasting", "enums", "optim", "options"):
    sys.modules[f"{__name__}.{_name}"] = getattr(_interface, _name)
