"""Workers that share nothing but a network: who may join, the streams between them, and whether they are alive."""

import logging
import os

from collectives.errors import MissingBackendError

# Read when gRPC is loaded. Its core reports every connection that ends; what matters we say ourselves.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# What gRPC 1.85 does in a child that was forked while its threads are at work ends most of them by SIGABRT or SIGSEGV.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)  # it logs whatever strangers send as metadata

try:
    import grpc  # noqa: F401
except ImportError as error:
    raise MissingBackendError(f"the grpc backend needs gRPC ({error}); install it with: pip install grpcio") from error
