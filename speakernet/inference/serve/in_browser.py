"""The files with which the page of `speakernet serve --in-browser` runs a model: its graph, that of
silero-vad, and onnxruntime-web.
"""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speakernet.data.speech import silero_file
from speakernet.evaluation.embedding import preparation_in_words
from speakernet.evaluation.scoring import plda_of
from speakernet.files import FileError
from speakernet.inference.export import export_model
from speakernet.inference.serve.limits import DETECTOR, GRAPH, RUNTIME_FILES
from speakernet.models.model_file import load_model_file

logger = logging.getLogger(__name__)


def page_files(model_path: Path, folder: Path, speech: Sequence[np.ndarray]) -> dict[str, bytes]:
    """URL -> contents: the graph, compared with its network on `speech`, that of silero-vad, and
    the runtime from the folder `dist` of onnxruntime-web.
    """
    if missing := [name for name in RUNTIME_FILES if not (folder / name).is_file()]:
        raise FileError(
            f"{folder} has no {missing[0]}; expected the folder `dist` of onnxruntime-web: run "
            "`npm pack onnxruntime-web` and `tar xf onnxruntime-web-*.tgz package/dist`, then give "
            "--in-browser package/dist"
        )
    # Missing files are reported before the export, which is slow.
    detector = silero_file("silero_vad.onnx")
    if detector is None:
        raise FileError(
            "the page finds speech with silero-vad, which is not installed; run `pip install "
            "'silero-vad>=6.2,<7'`, or serve without --in-browser"
        )
    model = load_model_file(model_path)
    if model.net.preparation:
        todo = preparation_in_words(model.net.preparation)
        raise ValueError(
            f"{model_path}: with this model, {todo} before they are embedded, which the page "
            "cannot do; serve it without --in-browser"
        )
    if plda_of(model.contents) is not None:
        raise ValueError(
            f"{model_path} scores with PLDA, which the page cannot do; serve it without "
            "--in-browser"
        )
    logger.info("exporting %s for the browser", model_path)
    with tempfile.TemporaryDirectory(prefix="speakernet-serve-") as made:
        graph = Path(made) / GRAPH
        export_model(model, graph, speech=speech)
        files = {
            path.name: path.read_bytes() for path in (graph, *map(folder.joinpath, RUNTIME_FILES))
        }
    return {**files, DETECTOR: detector.read_bytes()}
