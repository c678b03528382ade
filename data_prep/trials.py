"""Trial lists: make them from any list, drop trials whose files are missing, rewrite a list for
another layout.
"""

from speakernet.cli import run_script

if __name__ == "__main__":
    run_script("prepare", "trials")
