#!/usr/bin/env bash
# GRPO with SkyRL on rollouts of a server.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
gpus=${GPUS:-8}
python3 -m "${ENTRYPOINT:-skyrl.train.entrypoints.main_base}" \
    trainer.override_entrypoint=rollyard.train.plugins.skyrl \
    "data.train_data=['${DATA:-$here/train.parquet}']" \
    "data.val_data=['${DATA:-$here/train.parquet}']" \
    trainer.eval_interval=-1 \
    trainer.eval_before_train=false \
    trainer.policy.model.path="${MODEL:-Qwen/Qwen3-4B}" \
    trainer.policy.optimizer_config.lr=1e-6 \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.strategy=fsdp \
    trainer.placement.colocate_all=true \
    trainer.placement.policy_num_gpus_per_node="$gpus" \
    trainer.placement.ref_num_gpus_per_node="$gpus" \
    trainer.train_batch_size=32 \
    trainer.policy_mini_batch_size=32 \
    trainer.max_prompt_length=8192 \
    trainer.epochs=20 \
    trainer.logger=console \
    generator.n_samples_per_prompt=8 \
    generator.inference_engine.num_engines="$gpus" \
    generator.sampling_params.max_generate_length=4096 \
    "$@"
