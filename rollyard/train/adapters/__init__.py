"""Rollouts in the shapes of other trainers: one module per trainer, pure functions, no import of the trainer.

    rows.py             what may be trained on, and a loud no to the rest
    trl.py              GRPOTrainer's rollout_func, AsyncGRPOTrainer's worker (trl_worker.py)
    openenv.py          TrainingTrace and TraceEntry (sessions: `rollyard.train.openenv_session`)
    verifiers.py        Trace of MessageNodes; prime_rl.py its TrainingSample
    atropos.py          a group for POST /scored_data
    skyrl.py verl.py slime.py areal.py openrlhf.py rllm.py tinker.py art.py nemo_gym.py agent_lightning.py

Four laws hold in all of them. A reward of None leaves the rollout out and is never a zero. A rollout that has a reward and
no token that can be proved is an error that says why. A baseline is over rollouts, never over rows. Each sampled answer
trains once; what was not sampled never does.
"""
