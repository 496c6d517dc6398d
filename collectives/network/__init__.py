"""Workers that share nothing but a network: who may join, the streams between them, and whether they are alive."""

import os

from collectives.errors import MissingBackendError

# Read when gRPC is loaded. Its core reports every connection that ends; what matters we say ourselves.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

try:
    import grpc  # noqa: F401
except ImportError as error:
    raise MissingBackendError(f"the grpc backend needs gRPC ({error}); install it with: pip install grpcio") from error
