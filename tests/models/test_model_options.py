"""Sizes of a family share options and docs, and a section of a model fits the parts that it names."""

import pytest

from speakernet.models.options import MODELS, POOLINGS, ModelOptions
from speakernet.options import OptionError, default_of, variant


def test_a_size_is_its_family_with_other_defaults() -> None:
    small, large = MODELS["ReDimNetB0"].options, MODELS["ReDimNetB6"].options
    assert list(small.model_fields) == list(large.model_fields)
    assert (default_of(small, "channels"), default_of(large, "channels")) == (10, 32)
    large().stages.append([1, 1, 1, 0])
    assert len(large().stages) == 6
    with pytest.raises(OptionError, match="channels is 0"):
        large(channels=0)


@pytest.mark.parametrize("name", MODELS)
def test_defaults_of_every_size_are_values_of_their_options(name: str) -> None:
    options = MODELS[name].options()
    assert not list(options.problems())
    assert options.published_dim and options.embedding_layer


def test_a_default_for_an_option_that_the_family_has_not_is_an_error() -> None:
    with pytest.raises(KeyError, match="width"):
        variant(MODELS["ResNet"].options, "Wide", {"width": 3})


def test_a_section_has_the_options_of_the_parts_that_it_names() -> None:
    section = ModelOptions(name="ResNet34", pooling="MQMHASTP")
    assert type(section.options) is MODELS["ResNet34"].options
    assert section.pooling_options == POOLINGS["MQMHASTP"].options()
    with pytest.raises(OptionError, match="ResNet50"):
        ModelOptions(name="ResNet50", options=section.options)
    with pytest.raises(OptionError, match="TSTP"):
        ModelOptions(name="ResNet50", pooling_options=section.pooling_options)
