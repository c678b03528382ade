"""Foreign checkpoints, one file a format: each says whether it knows a file and puts its weights into our names."""

import shlex
from pathlib import Path
from typing import Any

from speakernet.files import FileError
from speakernet.models.importers import redimnet, speechbrain, three_d_speaker, voxceleb_trainer, wespeaker
from speakernet.models.importers.renaming import Translated
from speakernet.models.importers.voxceleb_trainer import Description
from speakernet.models.speaker_net import SpeakerNet

PUBLISHED = {format.SOURCE: format for format in (wespeaker, three_d_speaker, speechbrain, redimnet)}
FORMATS = {voxceleb_trainer.SOURCE: voxceleb_trainer}


def translate(contents: Any, net: SpeakerNet, path: str | Path) -> Translated:
    """A checkpoint's weights in the names of `net`, by the first importer that knows it.

    Raises:
        ValueError: no importer knows it, or it is not what `net` is.
    """
    for importer in FORMATS.values():
        if importer.is_ours_to_read(contents):
            return importer.translate(contents, net, path)
    keys = ", ".join(map(str, list(contents)[:5])) if isinstance(contents, dict) else type(contents).__name__
    # Readers keep the words of a FileError.
    raise FileError(
        f"{path} is neither a speakernet model file nor a checkpoint of {', '.join(FORMATS)}; it holds: {keys}. "
        f"If it is a checkpoint of {', '.join(PUBLISHED)}, make it a model file with "
        f"`speakernet import-weights {shlex.quote(str(path))} --from TOOLKIT --model NAME --out model.pt`"
    )


__all__ = ["FORMATS", "PUBLISHED", "Description", "Translated", "translate"]
