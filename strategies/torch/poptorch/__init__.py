"""PopTorch's interface, under the name that programs import. Its modules are in `strategies.compat.poptorch`."""

import sys

import strategies.compat.poptorch as _interface
from strategies.compat.poptorch import *  # noqa: F403
from strategies.compat.poptorch import __all__ as __all__
from strategies.compat.poptorch import __getattr__ as __getattr__
from strategies.compat.poptorch import __version__ as __version__

for _name in [name for name in sys.modules if name.startswith(f"{_interface.__name__}.")]:
    sys.modules[__name__ + _name.removeprefix(_interface.__name__)] = sys.modules[_name]
