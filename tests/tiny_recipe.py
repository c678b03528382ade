"""The recipe of a minimal run, for tests that need a real one and override what they need."""

import yaml

MANY_STEPS = {"training": {"max_epochs": 5000, "test_interval": 5000}}
"""More than any test waits for; for runs that are stopped."""
LARGE_MARGIN = """
name: large_margin
augment: {speed_factors: [1.0]}
loss: {margin: 0.5}
optimizer: {learning_rate: 1.0e-4}
training: {average_checkpoints: 0}
"""


def two_stages(epochs, later_epochs, crop_frames):
    """The entries of training.stages for a run that ends with a large margin and longer crops."""
    last = yaml.safe_load(LARGE_MARGIN)
    last |= {"epochs": later_epochs, "data": {"crop_frames": crop_frames}}
    return [{"name": "base", "epochs": epochs}, last]


EVERY_STAGE = yaml.safe_load("""
frontend: {spec_augment: true}
loss: {name: aamsoftmax}
schedule: {name: step}
training: {test_interval: 1, save_steps: 2, average_checkpoints: 2, ema_decay: 0.9}
evaluation: {eval_frames: 40, num_crops: 2, bootstrap_samples: 20}
runtime: {deterministic: true}
""")
EVERY_STAGE["training"]["stages"] = two_stages(2, 1, 60)
"""Moving average, mean of checkpoints, large margin, evaluation and report; the same bits every
time."""

RECIPE = """
data: {batch_size: 4, crop_frames: 40, num_workers: 0}
model: {name: ResNet, embedding_dim: 8, options: {channels: 8, blocks: [1], stem_stride: 4}}
loss: {name: amsoftmax}
training: {log_interval: 1}
runtime: {device: cpu, precision: "no", compile: "off"}
augment: {enabled: false}
"""


def recipe_of(corpus, run, *changes):
    """Section -> option -> value of a run in `run` over a corpus with its lists; later `changes`
    take precedence.
    """
    lists = {"train_list": "train_list.txt", "test_list": "trials.txt"}
    lists = {name: str(corpus / file) for name, file in lists.items()}
    paths = {name: str(corpus) for name in ("train_path", "test_path")}
    sections = yaml.safe_load(RECIPE)
    for change in ({"data": lists | paths, "training": {"save_path": str(run)}}, *changes):
        for section, options in change.items():
            sections.setdefault(section, {}).update(options)
    return sections


def write_recipe(path, corpus, run, *changes):
    """Write that recipe and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(recipe_of(corpus, run, *changes), sort_keys=False))
    return path
