"""A network with where and how it is run: what turns the utterances of a list into embeddings, or finds them kept."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from speakernet import distributed
from speakernet.data.lists import StringTable
from speakernet.data.sources import AudioSource
from speakernet.evaluation.embedding import EmbeddingNet, embed_utterances, reader_threads
from speakernet.evaluation.embedding_store import load_embeddings, save_embeddings, store_key
from speakernet.evaluation.options import EmbeddingOptions, Mode
from speakernet.machine.settings import many_shapes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Embedder:
    """The network and how it is run.

    Attributes:
        net: the network.
        options: what is embedded, and how much at once.
        device: where it runs.
        autocast: gives the context that it runs in.
        precision: name of what `autocast` does, for the key of kept embeddings.
        store: folder where embeddings are kept; None keeps nothing.
        model_digest: what the network's weights are known by; embeddings are kept only with one.
        is_stopped: whether the work should be left (`Stopped`); asked after every batch.
    """

    net: EmbeddingNet
    options: EmbeddingOptions
    device: torch.device | str = "cpu"
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    precision: str = "no"
    store: Path | None = None
    model_digest: str = ""
    is_stopped: Callable[[], bool] = lambda: False

    def unkept(self) -> "Embedder":
        """The same, without looking for kept embeddings or keeping any."""
        return dataclasses.replace(self, store=None)

    def embed(self, names: StringTable, source: AudioSource, mode: Mode, list_name: str) -> np.ndarray:
        """Embeddings (utterances, crops, dim) in one mode, from disk where they are kept and still hold.

        Args:
            names: utterances, each once.
            source: where their audio lies.
            mode: crops or whole utterances.
            list_name: what they are kept by, and called while it takes.

        Raises:
            ValueError: audio that is missing or broken.
        """
        return self.find_or_embed(names, source, mode, list_name)[0]

    def find_or_embed(
        self, names: StringTable, source: AudioSource, mode: Mode, list_name: str
    ) -> tuple[np.ndarray, bool]:
        """The same as `embed`, and whether they were kept: then the time it took says nothing of speed."""
        options = self.options.in_mode(mode)
        description = f"embedding {list_name.replace('_', ' ')}"
        if self.store is None or not self.model_digest:
            return self._embed(names, source, options, description), False
        frames = options.eval_frames if mode == "crops" else 0
        settings = {"frames": frames, "crops": options.num_crops if frames else 1, "precision": self.precision}
        key = store_key(self.model_digest, names, source.lookup_table(names, reader_threads(options)), settings)
        path = self.store / f"{list_name}.{mode}.npz"
        # One process looks, so that all take the same way through the collectives that follow.
        kept = distributed.broadcast_object(load_embeddings(path, key) if distributed.is_main() else None)
        if kept is not None:
            logger.info("embeddings of %d utterances taken from %s", len(names), path)
            return kept, True
        embeddings = self._embed(names, source, options, description)
        if distributed.is_main():
            save_embeddings(path, key, names, embeddings)
        return embeddings, False

    def _embed(
        self, names: StringTable, source: AudioSource, options: EmbeddingOptions, description: str
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
