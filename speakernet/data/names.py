"""Names of recordings as text: the form in which they are compared, and what is odd about a name
that is not found.
"""

import re
import shlex
import unicodedata

WINDOWS_PATH = re.compile(r"^[A-Za-z]:[\\/]|\\")
QUOTES = ('"', "'")
CONVERTED = "converted"
"""The folder of recordings that `prepare` converted; below it are the folders of the originals."""


def compose_accents(name: str) -> str:
    """A name in the form in which names are compared: accent and letter are one character if there
    is such a one.
    """
    # NFC, because keyboards and most lists write it; the decomposed form comes from Macs.
    return unicodedata.normalize("NFC", name)


def normal_name(name: str) -> str:
    """A path in the form in which `prepare` compares paths; `..` stays, because it may follow a
    link.

    >>> normal_name("./anna//monday/./1.wav"), normal_name("/data//1.wav")
    ('anna/monday/1.wav', '/data/1.wav')
    """
    pieces = [piece for piece in compose_accents(name).split("/") if piece not in ("", ".")]
    return "/" * name.startswith("/") + "/".join(pieces)


def original_name(name: str) -> str:
    """The name that a recording had before `prepare` converted it; other names are unchanged.

    >>> original_name("/data/mine/converted/anna/monday/1.m4a.wav"), original_name("anna/1.wav")
    ('anna/monday/1.m4a', 'anna/1.wav')
    """
    folder, is_converted, original = name.partition(f"/{CONVERTED}/")
    # `prepare` lists what it converted by absolute paths. In a relative path, `converted` is the
    # user's own folder.
    if not is_converted or not folder.startswith("/"):
        return name
    return original.removesuffix(".wav")


def folders_of(name: str) -> list[str]:
    """The folders in the original name of a recording.

    >>> folders_of("anna/monday/1.wav")
    ['anna', 'monday']
    """
    return original_name(name).replace("\\", "/").split("/")[:-1]


def one_word(speaker: str) -> str:
    """The speaker's name with underscores for white space, at which the speaker ends in a list.

    >>> one_word("Anna Maria")
    'Anna_Maria'
    """
    return "_".join(speaker.split())


def session_of(speaker: str, name: str) -> str:
    """The session of a speaker's recording: the folders between the speaker's and the file; empty
    if there are none.

    >>> session_of("Anna_Maria", "wav/Anna Maria/monday/1.wav")
    'monday'
    """
    folders = folders_of(name)
    # A folder may have spaces in its name, but lists write the speaker as one word.
    speakers = [one_word(folder) for folder in folders]
    if speaker not in speakers:
        return ""
    return "/".join(folders[speakers.index(speaker) + 1 :])


def advice_on_name(name: str) -> str:
    """What to do about a name that no file has, judged by the name alone; empty if nothing is odd
    about it.

    >>> advice_on_name("anna/1.wav")
    ''
    """
    rewrite = "speakernet prepare trials rewrite LIST NEW_LIST"
    if name[:1] in QUOTES and name[-1:] == name[:1]:
        mark = shlex.quote(name[0])
        return (
            "the paths are in quotation marks, which count as part of a name; remove them: "
            f"`{rewrite} --replace {mark} ''`"
        )
    if WINDOWS_PATH.search(name):
        # The drive has to be removed too, since no folder is called `C:` here.
        drive = f" --strip {shlex.quote(name[:3])}" if name[1:2] == ":" else ""
        return (
            "the paths have backslashes or a drive letter, as on Windows; write them with "
            f"slashes: `{rewrite}{drive} --replace '\\' /`"
        )
    return ""
