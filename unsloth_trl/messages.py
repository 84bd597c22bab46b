"""What other libraries' errors say, as a part of a message of our own."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
