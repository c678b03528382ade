"""Foreign checkpoints, one file a format: each says whether it knows a file and puts its weights into our names."""

from pathlib import Path
from typing import Any

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
    raise ValueError(
        f"{path} is neither a speakernet model file nor a checkpoint of {', '.join(FORMATS)}; it holds: {keys}. "
        f"Of {', '.join(PUBLISHED)}, make it a model file with `speakernet import-weights {path} --from … --model …`"
    )


__all__ = ["FORMATS", "PUBLISHED", "Description", "Translated", "translate"]
