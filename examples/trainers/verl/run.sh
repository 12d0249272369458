#!/usr/bin/env bash
# GRPO with verl on rollouts of a server. `./run.sh --cfg job` prints the configuration that verl makes of it, and stops.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="${DATA:-$here/train.parquet}" \
    data.val_files="${DATA:-$here/train.parquet}" \
    data.train_batch_size=32 \
    data.max_prompt_length=8192 \
    data.max_response_length=16384 \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-4B}" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/loops.yaml" \
    actor_rollout_ref.rollout.agent.default_agent_loop=rollyard \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.val_before_train=false \
    trainer.test_freq=-1 \
    trainer.logger='["console"]' \
    "$@"
