"""The only place that imports torchaudio; one that does not fit the installed torch is answered with its cure."""

try:
    from torchaudio.compliance.kaldi import get_mel_banks
    from torchaudio.functional import melscale_fbanks
except (ImportError, OSError, RuntimeError) as error:
    raise ImportError(
        "torchaudio could not be loaded beside the installed torch; it must be a release built for it. Mend it with:\n"
        "  pip uninstall -y torch torchaudio\n"
        "  pip install 'torch>=2.9,<2.15' 'torchaudio>=2.9,<2.12'\n"
        f"(the loader said: {error})"
    ) from error

__all__ = ["get_mel_banks", "melscale_fbanks"]
