#!/bin/bash
#SBATCH --job-name=distill
#SBATCH --output=/dev/null
#SBATCH --signal=USR2@120
#SBATCH --time=30
#SBATCH --requeue
#SBATCH --comment='two words'
#SBATCH --exclusive
#SBATCH --mem=500M
#SBATCH --partition=students
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=1
#SBATCH --gres=gpu:2
#SBATCH hetjob
#SBATCH --time=30
#SBATCH --requeue
#SBATCH --comment='two words'
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --partition=teachers
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
export DISAGGKD_LOG='/shared/it'"'"'s a run'"/$SLURM_JOB_ID"
exec >>"${DISAGGKD_LOG}_${SLURM_RESTART_COUNT:-0}_batch.log" 2>&1
# Results of an earlier run of this job would be taken for this run's.
rm -f "$DISAGGKD_LOG"_*_result.pkl "$DISAGGKD_LOG"_*.save_tmp

true  # module load cuda
export PYTHONSAFEPATH=1
export NCCL_DEBUG=WARN
export SLURM_EXPORT_ENV=ALL
export SUBMITIT_EXECUTOR=hetslurm
export DISAGGKD_ROLES=student:2x4,teacher:1x1

srun --kill-on-bad-exit=1 --label \
    --het-group=0 --cpus-per-task=1 --cpu-bind=cores bash -c 'exec >>"${DISAGGKD_LOG}_${SLURM_PROCID}_log.out" 2>>"${DISAGGKD_LOG}_${SLURM_PROCID}_log.err"; exec "$@"' task /venv/bin/python -u -m submitit.core._submit '/shared/it'"'"'s a run' : \
    --het-group=1 bash -c 'exec >>"${DISAGGKD_LOG}_${SLURM_PROCID}_log.out" 2>>"${DISAGGKD_LOG}_${SLURM_PROCID}_log.err"; exec "$@"' task /venv/bin/python -u -m submitit.core._submit '/shared/it'"'"'s a run'
code=$?
echo "srun ended with $code"
exit "$code"
