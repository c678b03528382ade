"""Package metadata, dependency bounds and the console script; tool settings live in
pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

CORE = [
    # torchaudio 2.11 does not load with torch 2.15 (different CUDA build); before changes see
    # docs/troubleshooting.md.
    "torch>=2.9,<2.15",
    "torchaudio>=2.9,<2.12",
    "soundfile>=0.13",
    "scipy>=1.10",
    "numpy>=1.24",
    "PyYAML>=6.0",
    "tqdm>=4.65",
    "tensorboard>=2.12",
    "matplotlib>=3.7",
    "psutil>=5.9",
    "safetensors>=0.4",
    # Only its weights are used (data/speech.py); it needs torch and packaging alone.
    "silero-vad>=6.2,<7",
    "pydantic>=2.7,<3",
    "annotated-types>=0.6",
    # Earlier versions empty the lock file while they wait; it names the run that uses the folder.
    "filelock>=4.1,<5",
    "requests>=2.32,<3",
    "jinja2>=3.1,<4",
    # Also a dependency of torch.
    "fsspec>=2023.6",
]
# torch's exporter needs onnxscript.
EXPORT = ["onnx>=1.16", "onnxscript>=0.5", "onnxruntime>=1.18"]
SERVE = ["fastapi>=0.110", "uvicorn>=0.30", "python-multipart>=0.0.18"]
S3 = ["s3fs>=2023.6"]
ENCRYPTION = ["cryptography>=42"]
SHELL = ["shtab>=1.7"]
# mlflow-skinny is mlflow without its server.
TRACKERS = ["wandb>=0.19", "mlflow-skinny>=2.20"]
HUB = ["huggingface_hub>=1,<3"]
SSL = ["transformers>=5,<6", "peft>=0.18,<1", *HUB]
# All that it needs is in CORE now; the name stays, because guides and scripts have it.
WHO: list[str] = []
DOCS = ["mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.26", "nbconvert>=7", "ipykernel>=6"]
# What the default tests need; the extras are repeated, because pip resolves that much faster.
TEST = [
    *EXPORT,
    *SERVE,
    *ENCRYPTION,
    *SHELL,
    *HUB,
    *WHO,
    "jsonschema>=4.18",
    "httpx>=0.27",
    "pytest>=8",
    "pytest-timeout>=2.2",
    "pytest-xdist>=3.5",
    "hypothesis>=6.90",
    "imageio-ffmpeg>=0.5",
    "scikit-learn>=1.3",
]
EXTRAS = {
    "export": EXPORT,
    "serve": SERVE,
    # For mirrors on S3; other addresses need gcsfs, paramiko ….
    "s3": S3,
    "remote": S3,
    "gpu": ["nvidia-ml-py>=12"],
    "encryption": ENCRYPTION,
    "hub": HUB,
    "ssl": SSL,
    "who": WHO,
    "notebook": ["jupyterlab>=4"],
    "shell": SHELL,
    "trackers": TRACKERS,
    "docs": DOCS,
    "test": TEST,
    # All that continuous integration needs: the tests marked `needs`, lint, types, the site.
    "test-all": [
        *TEST,
        *S3,
        "moto[server]>=5",
        *TRACKERS,
        "sherpa-onnx>=1.12",
        *SSL,
        *DOCS,
        "h5py>=3.10",  # wespeaker's PLDA
        "pytest-cov>=5",
        "ruff>=0.6",
        "mypy>=1.11",
        "types-jsonschema",
        "types-PyYAML",
        "types-psutil",
        "types-requests",
        "types-tqdm",
        "build>=1.2",
        "setuptools>=68",
    ],
}
PACKAGE = Path(__file__).with_name("speakernet").joinpath("__init__.py").read_text(encoding="utf-8")
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', PACKAGE, flags=re.MULTILINE)

setup(
    name="speakernet",
    version=VERSION,
    description="Fast, safe training of speaker-verification models",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)],
    # configs/ becomes the package speakernet.recipes so that bare recipe names work from an
    # installed wheel too.
    packages=[
        *find_namespace_packages(include=["speakernet", "speakernet.*"]),
        "speakernet.recipes",
    ],
    package_dir={"speakernet.recipes": "configs"},
    package_data={
        "speakernet.recipes": ["*.yaml", "voxceleb/*.yaml", "schema.json"],
        "speakernet": ["**/*.yaml", "**/*.json", "**/*.j2", "**/page/*", "py.typed"],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["speakernet = speakernet.cli:main"]},
)
