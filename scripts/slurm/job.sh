# shellcheck shell=bash
# What the jobs in this folder share; sourced by them, not run. docs/slurm.md tells the whole story.
#
# A job file sets its own variables and the array `training`, Megatron's flags, then calls `train`.
# On SIGUSR1, which SLURM sends before the time limit, the ranks save a checkpoint and end, and the
# job goes back into the queue. Started again, it goes on from that checkpoint.

# Variables of every job; each can be set in the environment of sbatch.

# Where the run lives: checkpoints, log, wandb. Seen by all nodes. Give an old one to go on with it.
RUN_DIR="${RUN_DIR:-}"
RUN_NAME="${RUN_NAME:-${SLURM_JOB_NAME:-run}}"
# Sourced before anything runs, for `module load` and the like.
SETUP_FILE="${SETUP_FILE:-}"
PYTHON="${PYTHON:-python}"
# The script to train with, and what goes before it, such as --cpu.
SCRIPT="${SCRIPT:-${MEGATRON:-$REPO/../Megatron-LM}/pretrain_gpt.py}"
LAUNCHER_FLAGS="${LAUNCHER_FLAGS:-}"
RANKS_PER_NODE="${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}"
# Where the ranks meet; empty: the first node, and a port made from the job's number.
MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-}"
SAVE_INTERVAL="${SAVE_INTERVAL:-500}"
# Further flags of Megatron and megatron_ext; they come last and win.
EXTRA_FLAGS="${EXTRA_FLAGS:-}"
# Crashes in a row without a new checkpoint after which the job is not requeued any more.
CRASH_REQUEUES="${CRASH_REQUEUES:-1}"
# A curve file of `megatron-ext collapse fit`; empty: no watch.
COLLAPSE_REFERENCE="${COLLAPSE_REFERENCE:-}"
COLLAPSE_ACTION="${COLLAPSE_ACTION:-alert}"
# Empty: no wandb. WANDB_MODE=online needs a login on the compute nodes.
WANDB_PROJECT="${WANDB_PROJECT:-}"
WANDB_MODE="${WANDB_MODE:-offline}"
# Empty: no container. Runtime: pyxis (srun's plugin), or enroot (called by each task).
CONTAINER_IMAGE="${CONTAINER_IMAGE:-}"
CONTAINER_RUNTIME="${CONTAINER_RUNTIME:-pyxis}"
# More folders to mount, as SOURCE:TARGET,...; the repository and RUN_DIR are mounted anyway.
CONTAINER_MOUNTS="${CONTAINER_MOUNTS:-}"
# 1: only say what would run.
DRY_RUN="${DRY_RUN:-}"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Megatron asks for it with tensor parallelism.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# Nothing below needs to be changed.

set -euo pipefail

say() { printf '%s: %s\n' "${SLURM_JOB_NAME:-job}" "$*"; }

die() {
    printf '%s: error: %s\n' "${SLURM_JOB_NAME:-job}" "$*" >&2
    exit 2
}

# From the start, since the default action would end the job.
signals=0
on_signal() {
    signals=$((signals + 1))
    say "SIGUSR1 at $(date '+%F %T'): asking for a checkpoint and the end"
    touch -- "$RUN_DIR/stop" 2>/dev/null || true # or when the step starts
}
trap on_signal USR1

JOB="${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-0}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
START="${SLURM_RESTART_COUNT:-0}"
NODES="${SLURM_JOB_NUM_NODES:-${NODES:-1}}"
SAVED="" # folder of the checkpoints

# Find everything, or say what is missing before 128 GPUs wait for it.
prepare() {
    if [[ -n $SETUP_FILE ]]; then
        [[ -r $SETUP_FILE ]] || die "SETUP_FILE=$SETUP_FILE: no such file"
        set +u # such files often use variables that are not set
        # shellcheck disable=SC1090
        source "$SETUP_FILE"
        set -u
    fi
    RUN_DIR="${RUN_DIR:-${SLURM_SUBMIT_DIR:-$PWD}/runs/$RUN_NAME-$JOB}"
    [[ $RUN_DIR == /* ]] || RUN_DIR="${SLURM_SUBMIT_DIR:-$PWD}/$RUN_DIR"
    SAVED="$RUN_DIR/checkpoints"
    export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
    # Logs of a job appear when they are written.
    export PYTHONUNBUFFERED=1
    # Where a rank dies, PyTorch prints a C++ trace for every connection to it.
    export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
    [[ -n $CONTAINER_IMAGE || -r $SCRIPT ]] ||
        die "$SCRIPT: no such script; set MEGATRON to a Megatron-LM checkout, or SCRIPT"
    [[ -z $COLLAPSE_REFERENCE || -r $COLLAPSE_REFERENCE ]] ||
        die "COLLAPSE_REFERENCE=$COLLAPSE_REFERENCE: no such file"
    [[ -n $CONTAINER_IMAGE ]] || command -v "$PYTHON" >/dev/null ||
        die "PYTHON=$PYTHON: no such program"
    [[ -n $DRY_RUN ]] && return
    mkdir -p -- "$SAVED" || die "cannot make RUN_DIR=$RUN_DIR"
    keep_others_out
    rm -f -- "$RUN_DIR/stop"
}

# Two jobs that write into one folder would ruin both.
keep_others_out() {
    local owner
    owner="$(cat -- "$RUN_DIR/job" 2>/dev/null || true)"
    if [[ -n $owner && $owner != "$JOB" ]] &&
        [[ -n "$(squeue --noheader --states=RUNNING,COMPLETING --jobs="$owner" 2>/dev/null)" ]]; then
        die "RUN_DIR=$RUN_DIR is in use by job $owner; wait for it, or choose another RUN_DIR"
    fi
    printf '%s\n' "$JOB" >"$RUN_DIR/job"
}

# Last iteration of which a whole checkpoint is there.
saved_iteration() {
    local iteration
    iteration="$(cat -- "$SAVED/latest_checkpointed_iteration.txt" 2>/dev/null || true)"
    [[ $iteration =~ ^[0-9]+$ ]] || iteration=0
    printf '%d\n' "$((10#$iteration))"
}

# Value of a flag in `training`, the last one if it is there more than once.
value_of() {
    local number value=""
    for ((number = 0; number < ${#training[@]}; number++)); do
        case "${training[number]}" in
            "$1") value="${training[number + 1]:-}" ;;
            "$1="*) value="${training[number]#*=}" ;;
        esac
    done
    printf '%s\n' "$value"
}

# What goes around a program that is to run in the container: `around_srun` before it on srun's
# own command line, `around_task` before it in the task.
choose_container() {
    around_srun=() around_task=()
    [[ -n $CONTAINER_IMAGE ]] || return 0
    local mounts="$REPO:$REPO,$RUN_DIR:$RUN_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" mount name
    case "$CONTAINER_RUNTIME" in
        pyxis)
            around_srun=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts"
                --container-workdir="$RUN_DIR")
            ;;
        enroot)
            around_task=(enroot start --rw)
            for mount in ${mounts//,/ }; do
                around_task+=(--mount "$mount")
            done
            # By name: each task has values of its own. pyxis passes the environment by itself.
            while IFS= read -r name; do
                around_task+=(--env "$name")
            done < <(compgen -e | grep -E '^(SLURM|CUDA|GLOO|MEGATRON|NCCL|OMP|PY|TORCH|UCX|WANDB)')
            around_task+=(--env SLURM_NODEID "$CONTAINER_IMAGE")
            ;;
        *) die "CONTAINER_RUNTIME=$CONTAINER_RUNTIME is neither pyxis nor enroot" ;;
    esac
}

# Run a program once, on the first node and in the container if there is one.
once() {
    if [[ -z $CONTAINER_IMAGE || -n $DRY_RUN ]]; then
        "$@"
    else
        srun --nodes=1 --ntasks=1 "${around_srun[@]}" "${around_task[@]}" "$@"
    fi
}

# One wandb run for all starts of a run, also by another job.
choose_wandb_run() {
    local file="$RUN_DIR/wandb-run-id"
    [[ -n $WANDB_PROJECT ]] || return 0
    if [[ -z ${WANDB_RUN_ID:-} ]]; then
        WANDB_RUN_ID="$(cat -- "$file" 2>/dev/null || true)"
        WANDB_RUN_ID="${WANDB_RUN_ID:-${SLURM_CLUSTER_NAME:-slurm}-$JOB}"
    fi
    [[ -n $DRY_RUN ]] || printf '%s\n' "$WANDB_RUN_ID" >"$file"
    export WANDB_MODE WANDB_RUN_ID WANDB_RESUME="${WANDB_RESUME:-allow}"
    # Megatron logs losses to wandb only where it logs them to TensorBoard, too.
    training+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "$RUN_NAME"
        --wandb-save-dir "$RUN_DIR" --tensorboard-dir "$RUN_DIR/tensorboard")
}

# Train to the end or to the signal, and say what becomes of the job; does not return but at the
# end of the training.
train() {
    local before after status end words=()
    training+=(--save "$SAVED" --load "$SAVED" --save-interval "$SAVE_INTERVAL"
        --exit-signal-handler --exit-signal SIGUSR1)
    [[ -z $COLLAPSE_REFERENCE ]] || training+=(--collapse-reference "$COLLAPSE_REFERENCE"
        --collapse-action "$COLLAPSE_ACTION")
    choose_wandb_run
    read -ra words <<<"$EXTRA_FLAGS"
    training+=("${words[@]}")
    check_sizes
    end="$(value_of --train-iters)"
    [[ $end =~ ^[0-9]+$ ]] || die "--train-iters is needed to know when the run is finished"

    if [[ -z $MASTER_ADDR && -n ${SLURM_JOB_NODELIST:-} ]]; then
        MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    fi
    # Another port at each start: the one before may not be free yet.
    MASTER_PORT="${MASTER_PORT:-$((20000 + (10#${SLURM_JOB_ID:-0} * 7 + START) % 10000))}"
    choose_container
    # All CPUs to the one task of each node: it starts the ranks. Where one node fails, the others
    # have a minute to say what they waited for; if all is well they end together.
    step=(srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1
        --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --kill-on-bad-exit=0 --wait=60
        --output="$RUN_DIR/train.log" --open-mode=append "${around_srun[@]}" "${around_task[@]}"
        "$PYTHON" "$REPO/scripts/slurm/launch_ranks.py" --nodes "$NODES" --ranks "$RANKS_PER_NODE"
        --address "${MASTER_ADDR:-localhost}:$MASTER_PORT" --job "$JOB-$START"
        --stop-file "$RUN_DIR/stop")
    read -ra words <<<"$LAUNCHER_FLAGS"
    step+=(megatron_ext "${words[@]}" "$SCRIPT" "${training[@]}")
    if [[ -n $DRY_RUN ]]; then
        printf '%q ' "${step[@]}"
        printf '\n'
        exit 0
    fi

    before="$(saved_iteration)"
    if ((before >= end)); then
        say "finished: $SAVED has iteration $before of $end"
        return 0
    fi
    say "start $START from iteration $before of $end on $NODES nodes; log: $RUN_DIR/train.log"
    status=0
    run_step || status=$?
    after="$(saved_iteration)"
    if ((status == 0 && after >= end)); then
        rm -f -- "$RUN_DIR/crashes"
        say "finished: iteration $after of $end"
        return 0
    elif ((status == 0 && signals == 0)); then
        say "ended before the signal, with a checkpoint of iteration $after of $end: not requeued"
        exit 0
    elif ((status == 0 && after > before)); then
        rm -f -- "$RUN_DIR/crashes"
        requeue "checkpoint of iteration $after of $end"
    elif ((status == 0)); then
        die "no new checkpoint between the start and the signal: give more time (sbatch --time)," \
            "or an earlier signal; not requeued"
    fi
    after_crash "$status" "$before" "$after"
}

# Start the step; its status, also where signals come meanwhile.
run_step() {
    local seen status pid
    "${step[@]}" &
    pid=$!
    while :; do
        seen=$signals
        # A signal that came before the step did.
        ((signals == 0)) || touch -- "$RUN_DIR/stop"
        status=0
        wait "$pid" || status=$?
        ((seen == signals)) && return "$status"
    done
}

check_sizes() {
    local tensor pipeline ranks=$((NODES * RANKS_PER_NODE))
    tensor="$(value_of --tensor-model-parallel-size)"
    pipeline="$(value_of --pipeline-model-parallel-size)"
    local model=$((${tensor:-1} * ${pipeline:-1}))
    ((ranks % model == 0)) || die "TP ${tensor:-1} x PP ${pipeline:-1} = $model does not divide" \
        "$NODES nodes x $RANKS_PER_NODE ranks = $ranks; change the layout, or sbatch --nodes"
}

# A run that crashes again and again without a new checkpoint will do so for ever.
after_crash() {
    local status="$1" before="$2" after="$3" crashes
    case "$status" in
        2) say "wrong flag or environment, see $RUN_DIR/train.log: not requeued" ;;
        86) say "stopped by --collapse-action stop, see $RUN_DIR/train.log: not requeued" ;;
        130 | 143) say "ended from outside: not requeued" ;;
    esac
    [[ ! $status =~ ^(2|86|130|143)$ ]] || exit "$status"
    crashes="$(cat -- "$RUN_DIR/crashes" 2>/dev/null || true)"
    [[ $crashes =~ ^[0-9]+$ && $after -eq $before ]] || crashes=0
    crashes=$((crashes + 1))
    printf '%d\n' "$crashes" >"$RUN_DIR/crashes"
    if ((crashes > CRASH_REQUEUES)); then
        say "ended with status $status, see $RUN_DIR/train.log; crash $crashes in a row without a" \
            "new checkpoint: not requeued" >&2
        exit "$status"
    fi
    requeue "crash with status $status, see $RUN_DIR/train.log; checkpoint of iteration $after"
}

requeue() {
    say "requeued: $1"
    # By these two numbers: the job's own may name the whole array.
    if ! scontrol requeue "$JOB"; then
        die "SLURM refuses to requeue; RUN_DIR=$RUN_DIR and the same command go on"
    fi
    exit 0
}

prepare
