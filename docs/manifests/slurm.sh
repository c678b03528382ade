#!/bin/bash
# Two nodes of eight GPUs under SLURM: sbatch docs/manifests/slurm.sh
# One task a GPU; speakernet finds its place by SLURM's variables. Preemption sends SIGUSR1 two minutes before the end.
#SBATCH --job-name=speakernet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
set -euo pipefail
srun python trainSpeakerNet.py --config voxceleb/resnet34.yaml --data.train_path /local/vox2_dev_packed --training.mirror "$HOME/mirrors/resnet34"
