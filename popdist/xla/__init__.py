"""What XLA is told before it starts, so that bits do not depend on the machine.

Nothing here imports numpy, MPI or JAX.
"""

from popdist.xla.sums import complain_of_sums, right_sums_setting
from popdist.xla.threads import thread_pool_setting, thread_pool_size

__all__ = ["complain_of_sums", "right_sums_setting", "thread_pool_setting", "thread_pool_size"]
