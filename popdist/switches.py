"""Options that are on or off."""


def require_switches(way_out: str = "", /, **switches: object) -> None:
    """Refuse what is neither True nor False, before it counts as one of them: `"no"` would be true.

    Args:
        way_out: behind the message.
        switches: by the names that the user knows.

    Raises:
        TypeError: naming the first one.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it is True or False{way_out}")


def require_switches_or_none(**switches: object) -> None:
    """Refuse what is neither True, False nor None; see `require_switches`."""
    require_switches(", or None", **{name: value for name, value in switches.items() if value is not None})
