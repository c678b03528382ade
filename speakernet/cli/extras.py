"""Libraries that only some commands need: what to install where one is missing."""


def missing_extra(doing: str, extra: str, error: ModuleNotFoundError) -> ValueError:
    """What to say where a library of an extra is missing.

    Args:
        doing: what was asked for, such as "serving".
        extra: as `pip install 'speakernet[EXTRA]'` has it.
        error: of the import.

    Raises:
        ModuleNotFoundError: the error itself, where a module of this package is missing.

    >>> str(missing_extra("serving", "serve", ModuleNotFoundError("no", name="fastapi.responses")))
    "serving needs the library fastapi, which is not installed: pip install 'speakernet[serve]'"
    """
    library = (error.name or "").partition(".")[0]
    if library == "speakernet":
        raise error
    return ValueError(f"{doing} needs the library {library}, which is not installed: pip install 'speakernet[{extra}]'")
