"""Say which published trial list a file is, so that a figure is compared with its own kind.

Original and cleaned VoxCeleb1 lists differ by a sixth of the error rate; nobody sees it from the file's name.
"""

from pathlib import Path

import numpy as np

from speakernet.data.lists import TrialList
from speakernet.data.preparation.verified import md5_of

#: MD5 of the file as published -> what it is.
PUBLISHED = {
    "29fc7cc1c5d59f0816dc15d6e8be60f7": "VoxCeleb1-O, original",
    "b73110731c9223c1461fe49cb48dddfc": "VoxCeleb1-O, cleaned",
    "b9ecf7aa49d4b656aa927a8092844e4a": "VoxCeleb1-E, original",
    "a53e059deb562ffcfc092bf5d90d9f3a": "VoxCeleb1-E, cleaned",
    "21c341b6b2168eea2634df0fb4b8fff1": "VoxCeleb1-H, original",
    "857790e09d579a68eb2e339a090343c8": "VoxCeleb1-H, cleaned",
}
#: (trials, targets) -> what it most likely is, for lists rewritten to another layout.
BY_SIZE = {
    (37720, 18860): "VoxCeleb1-O, original",
    (37611, 18802): "VoxCeleb1-O, cleaned",
    (581480, 290743): "VoxCeleb1-E, original",
    (552536, 276270): "VoxCeleb1-H, original",
    (550894, 275488): "VoxCeleb1-H, cleaned",
}


def identify_trials(trials: TrialList) -> str:
    """A sentence on which published list this is; empty when it is none that is known."""
    path = Path(trials.source)
    size = f"{len(trials):,} trials"
    if path.is_file():
        published = PUBLISHED.get(md5_of(path))
        if published:
            return f"this is {published}, {size}, as published"
    if trials.labels is None:
        return ""
    alike = BY_SIZE.get((len(trials), int(np.count_nonzero(trials.labels))))
    return f"as many trials and targets as {alike} ({size}), in another layout" if alike else ""
