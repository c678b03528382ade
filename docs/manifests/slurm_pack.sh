#!/bin/bash
# A corpus packed by sixteen tasks of a job array; the last to be done joins the parts: sbatch docs/manifests/slurm_pack.sh
#SBATCH --job-name=pack
#SBATCH --array=1-16
#SBATCH --cpus-per-task=8
set -euo pipefail
speakernet pack data/vox2_dev_packed --source data/voxceleb2/dev/wav --list data/lists/vox2_dev_list.txt --part "$SLURM_ARRAY_TASK_ID/16"
