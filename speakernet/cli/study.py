"""Train variants of a recipe with several seeds, and compare them in one table.

    speakernet study plan.yaml --save_path exps/study --train_list L --test_list T
    speakernet study plan.yaml --save_path exps/study … --only wide --seeds 1 2 3 4
    speakernet study plan.yaml --save_path exps/study … --table

A plan is a YAML file:

    recipe: small_data.yaml
    seeds: [1, 2, 3]
    reference: base
    common:                                # options of all runs
      training: {max_epochs: 50}
    variants:
      base:
      lower rate: {optimizer: {learning_rate: 0.0003}}
      crops of 3 s: {evaluation: {embedding: crops, eval_frames: 300}}

With `held_out_speakers: 30`, that many speakers of the training list are held out of training, and
trials are made among them. A variant may name another `recipe`; one that only changes `evaluation`
scores the reference's models. Options on the command line are as for `speakernet train` and hold
for all variants. The same command resumes a study; table.md and table.tex in its folder have the
results, the folder of each run the files of `train`.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from speakernet.cli.shared import load_configuration
from speakernet.corpora.listing import positive_int
from speakernet.files import atomic_write
from speakernet.run_folder import lock_folder, refuse_unusable
from speakernet.terminal import counted

TAKES_CONFIG = True
USAGE = "PLAN --save_path FOLDER [--section.key VALUE …] [options below]"
ARGUMENTS = {
    "plan": {"type": Path, "help": "YAML file with the variants; the first word"},
    "--save_path": {"type": Path, "required": True, "help": "folder of the study"},
    "--only": {
        "nargs": "+",
        "default": [],
        "metavar": "NAME",
        "help": "only these variants, and the reference",
    },
    "--seeds": {
        "nargs": "+",
        "type": int,
        "metavar": "SEED",
        "help": "seeds to use instead of the plan's",
    },
    "--processes": {
        "type": positive_int,
        "default": 1,
        "help": "runs at a time, which share the cores (default 1)",
    },
    "--table": {"action": "store_true", "help": "only show the results so far"},
}


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing, then show and write the table."""
    if arguments.plan.suffix not in (".yaml", ".yml"):
        raise ValueError(
            f"{arguments.plan}: expected a plan (PLAN.yaml) as the first word after `study`"
        )
    refuse_unusable(arguments.save_path)
    # Late: a mistyped option of the command should not wait for torch to be imported.
    from speakernet.assembly.study import Study
    from speakernet.evaluation.report.page import latex
    from speakernet.evaluation.study import markdown, read_plan

    plan = read_plan(arguments.plan)
    if arguments.seeds:
        plan = plan.model_copy(update={"seeds": arguments.seeds})
    for name in arguments.only:
        if name not in plan.variants:
            raise ValueError(f"--only {name}: the plan has {', '.join(plan.variants)}")
    # The reference is always run, because every row of the table is a difference from it.
    only = {plan.reference, *arguments.only} if arguments.only else set(plan.variants)
    variants = [name for name in plan.variants if name in only]
    plugins = [word for path in arguments.plugin for word in ("--plugin", path)]
    folder = arguments.save_path
    # --table only reads, so it works while another process trains.
    with contextlib.nullcontext() if arguments.table else lock_folder(folder):
        # Each run is a command with its own folder, so that a crash affects no other and each can
        # be resumed or repeated like any run.
        study = Study(plan, folder, arguments.config_arguments, plugins, load_configuration)
        failed = []
        if not arguments.table:
            study.check(variants)
            failed = study.carry_out(variants, arguments.processes)
        table = study.table(variants)
        for name, text in (("table.md", markdown(table)), ("table.tex", latex(table))):
            with atomic_write(folder / name) as file:
                file.write(text)
    sys.stdout.write(markdown(table))
    # After the table, so that what succeeded is shown in any case.
    if failed:
        raise ValueError(
            f"{counted(len(failed), 'run')} failed, as their output.txt says: "
            f"{', '.join(map(str, failed))}; the same command repeats them"
        )
    return 0
