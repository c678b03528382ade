"""The options of a large pretrained speech model as a trunk, and of its fine-tuning. No torch
here.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import Field

from speakernet.models.options.trunks import Published, TrunkOptions
from speakernet.options import InputPath, Several, Share, Switch

Count = Annotated[int, Ge(0), Le(1000)]


class PretrainedOptions(TrunkOptions):
    """A large pretrained speech model (WavLM, w2v-BERT 2.0, wav2vec 2.0, HuBERT, data2vec, XLS-R)
    from transformers.
    """

    published = Published("Chen et al. 2022 and others", dim=256, mels=0)
    front_end_defaults: ClassVar = {"name": "raw"}
    poolings = ("MHFA", "LayerSum", "AdapterMFA")
    gives_layers = True
    training_only: ClassVar = frozenset(
        {
            "trained",
            "trained_layers",
            "unfreeze_epochs",
            "layer_decay",
            "gradient_factor",
            "lora_rank",
            "lora_alpha",
            "lora_targets",
            "lora_dropout",
            "reference",
            "spare",
        }
    )

    backbone: Annotated[str, MaxLen(4096)] = ""
    """A folder with config.json and *.safetensors, or a name on the Hugging Face hub such as
    facebook/w2v-bert-2.0."""
    revision: Annotated[str, MaxLen(200)] = "main"
    """Branch, tag or commit on the hub."""
    config: dict = Field(default_factory=dict)  # type: ignore[type-arg]
    """The backbone's own configuration; read from its folder and stored in model files."""
    source: dict = Field(default_factory=dict)  # type: ignore[type-arg]
    """Origin of the backbone: files with SHA-256, commit, licence; recorded when read and stored in
    model files."""
    normalize: Switch = "auto"
    """Normalise each waveform to mean 0 and variance 1; auto: as the backbone's own preprocessor
    does."""
    trained: Literal["nothing", "lora", "all"] = "nothing"
    """Trained part of the backbone: nothing, low-rank adapters merged at the end (LoRA, by peft),
    or its weights."""
    trained_layers: Count = 0
    """With `trained: all`, train only this many layers from the top; 0: all layers and everything
    below."""
    unfreeze_epochs: Count = 0
    """With `trained: all`, epochs until one more layer is trained, from the top down; 0: all from
    the first step."""
    layer_decay: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Learning-rate factor from each layer to the layer below, starting with 1 above the top
    layer."""
    gradient_factor: Share = 1.0
    """Factor on the gradient that flows from the pooling into the backbone (`feature_grad_mult` in
    BUT's recipes)."""
    lora_rank: Annotated[int, Ge(1), Le(1024)] = 64
    """Rank of the low-rank adapters."""
    lora_alpha: Annotated[float, Gt(0.0), Le(10_000.0)] = 128.0
    """The adapters' product is multiplied by this divided by the rank."""
    lora_targets: Annotated[Several[str], MinLen(1)] = ("auto",)
    """Last part of the names of linear layers with adapters; auto: queries and values, but
    feed-forward in WavLM."""
    lora_dropout: Share = 0.0
    """Dropout before the adapters."""
    reference: bool = False
    """Model files refer to the files of frozen weights, with SHA-256, instead of containing the
    weights."""
    spare: InputPath = ""
    """A model file with the same backbone, used if the backbone's folder is gone; a resumed run
    uses its best.pt."""

    @property
    def has_adapters(self) -> bool:
        """See `TrunkOptions.has_adapters`."""
        return self.trained == "lora"

    def with_spare(self, path: str) -> "PretrainedOptions":
        """These options, with `path` as `spare` unless it is set already."""
        return self.model_copy(update={"spare": self.spare or path})

    def problems(self) -> Iterator[tuple[str, str]]:
        """Neither a backbone nor a configuration, or an option without effect under this value of
        `trained`.
        """
        yield from super().problems()
        if not self.backbone and not self.config:
            yield (
                "backbone",
                "empty; expected a folder with config.json and safetensors, or a name on the hub",
            )
        for option in ("trained_layers", "unfreeze_epochs"):
            value = getattr(self, option)
            if value and self.trained != "all":
                yield (
                    option,
                    f"{value} has no effect with trained: {self.trained}; set trained: all",
                )
