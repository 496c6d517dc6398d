"""Workers that share only a network: admission, streams between workers, and liveness."""

import logging
import os

from collectives.errors import MissingBackendError

# Read when gRPC is loaded. gRPC's core would report every connection that ends; we log the relevant ones ourselves.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# After a fork while gRPC's threads are busy, the fork handlers of gRPC 1.85 mostly kill the child (SIGABRT, SIGSEGV).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)  # it logs arbitrary metadata from strangers

try:
    import grpc  # noqa: F401
except ImportError as error:
    raise MissingBackendError(f"the grpc backend needs gRPC ({error}); install it with: pip install grpcio") from error
