"""RIRS_NOISES (simulated and measured room impulse responses): download, verify, unpack, check,
make mono and trim.
"""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "rirs")
