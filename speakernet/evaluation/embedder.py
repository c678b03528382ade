"""A network with where and how it is run: what turns the utterances of a list into embeddings, or finds them kept."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.evaluation.embedding import EmbeddingNet, embed_utterances, reader_threads
from speakernet.evaluation.embedding_store import load_embeddings, save_embeddings, store_key
from speakernet.evaluation.options import EvaluationOptions, Mode
from speakernet.machine.settings import many_shapes
from speakernet.parallel import distributed


@dataclass(frozen=True)
class Embedder:
    """The network and how it is run.

    Attributes:
        net: the network.
        options: what is embedded, and how much at once.
        device: where it runs.
        autocast: gives the context that it runs in.
        precision: name of what `autocast` does, for the key of kept embeddings.
        stores: folders in which kept embeddings are looked for; new ones are written into the first.
        model_digest: identifies the network's weights.
        is_stopped: whether the work should be left (`Stopped`); asked after every batch.
    """

    net: EmbeddingNet
    options: EvaluationOptions
    device: torch.device | str = "cpu"
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    precision: str = "no"
    stores: tuple[Path, ...] = ()
    model_digest: str = ""
    is_stopped: Callable[[], bool] = lambda: False

    def unkept(self) -> "Embedder":
        """The same, without looking for kept embeddings or keeping any."""
        return dataclasses.replace(self, stores=())

    def embed(self, names: StringTable, source: AudioSource, mode: Mode, list_name: str) -> tuple[np.ndarray, bool]:
        """Embeddings (utterances, crops, dim) in one mode, and whether they were read from a store."""
        options = self.options.in_mode(mode)
        description = f"embedding {list_name.replace('_', ' ')}"
        if not self.stores:
            return self._embed(names, source, options, description), False
        frames = options.eval_frames if mode == "crops" else 0
        settings = {"frames": frames, "crops": options.num_crops if frames else 1, "precision": self.precision}
        key = store_key(self.model_digest, names, source.lookup_table(names, reader_threads(options)), settings)
        paths = [store / f"{list_name}.{mode}.npz" for store in self.stores]
        # Rank 0 alone looks, so that all ranks take the same way through the collectives that follow.
        found = (load_embeddings(path, key) for path in paths)
        kept = distributed.from_main(lambda: next((one for one in found if one is not None), None))
        if kept is not None:
            return kept, True
        embeddings = self._embed(names, source, options, description)
        if distributed.is_main():
            save_embeddings(paths[0], key, names, embeddings)
        return embeddings, False

    def _embed(
        self, names: StringTable, source: AudioSource, options: EvaluationOptions, description: str
    ) -> np.ndarray:
        # Whole utterances of a list have as many lengths as there are.
        shapes = many_shapes() if options.modes == ("whole",) else contextlib.nullcontext()
        with shapes:
            return embed_utterances(
                self.net,
                source,
                names,
                options,
                device=self.device,
                autocast=self.autocast,
                description=description,
                is_stopped=self.is_stopped,
            )
