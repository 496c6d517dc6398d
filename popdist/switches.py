"""Checks of on/off options."""


def require_switches(way_out: str = "", /, **switches: object) -> None:
    """Refuse values other than True and False: otherwise `"no"` would count as true.

    Args:
        way_out: Text to append to the message.
        switches: Values by the names that the user knows.

    Raises:
        TypeError: A value is not True or False. The message names the first such value.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it is True or False{way_out}")


def require_switches_or_none(**switches: object) -> None:
    """Refuse values other than True, False and None, with a TypeError as `require_switches`."""
    require_switches(", or None", **{name: value for name, value in switches.items() if value is not None})
