"""The environment variables by which an instance finds the process that has launched its function."""

ADDRESS_VARIABLE = "POPDIST_LAUNCH_ADDRESS"
"""Name of the launching process's local socket."""
NETWORK_VARIABLE = "POPDIST_LAUNCH_NETWORK"
"""`ADDRESS PORT` of the launching process for instances on other hosts; poprun sets it."""
TOKEN_VARIABLE = "POPDIST_LAUNCH_TOKEN"  # noqa: S105 - the name of a variable
"""Secret of the launch, which each instance inherits."""
LAUNCH_VARIABLES = (ADDRESS_VARIABLE, NETWORK_VARIABLE, TOKEN_VARIABLE)
